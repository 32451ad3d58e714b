"""`targets/tensorrt/build.py` on small graphs: what it sets, what it finds in the network, what its errors say."""

from __future__ import annotations

import logging
from pathlib import Path

import onnx
import pytest
from onnx import helper

from kvcompile.errors import ExportError
from kvcompile.targets.manifest import Graph, TensorInfo
from kvcompile.targets.tensorrt import adapter
from kvcompile.targets.tensorrt.build import Built, build
from kvcompile.targets.tensorrt.options import Options
from kvcompile.targets.tensorrt.profiles import Sizes
from tests.support.onnx_graphs import F16, F32, I64, attention, graph, node, update

pytest.importorskip("tensorrt_rtx_bindings")
_DTYPE = {F16: "float16", F32: "float32", I64: "int64"}


def built(
    model: onnx.ModelProto,
    folder: Path,
    options: Options | None = None,
    aliases: tuple[tuple[str, str], ...] = (),
) -> Built:
    """Build a graph whose dynamic sizes are b (batch), s and t (new tokens)."""
    names = {"b": "batch", "s": "tokens", "t": "slots"}
    inputs = []
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [
            names.get(d.dim_param, d.dim_param) if d.dim_param else d.dim_value for d in tensor.shape.dim
        ]
        inputs.append(
            {"name": value.name, "role": "cache", "dtype": _DTYPE[tensor.elem_type], "shape": shape}
        )
    told = Graph.model_validate(
        {
            "phase": "prefill",
            "file": "prefill.onnx",
            "inputs": inputs,
            "outputs": [
                {"name": value.name, "role": "logits", "dtype": "float32", "shape": ["batch"]}
                for value in model.graph.output
            ],
            "aliases": [{"input": a, "output": b, "in_place": True} for a, b in aliases],
        }
    )
    onnx.save(model, folder / "prefill.onnx")
    trt = adapter.load(("tensorrt_rtx_bindings",))
    return build(trt, folder / "prefill.onnx", told, Sizes(2, 4, 8), options or Options())


def test_attention_without_a_fused_kernel_is_decomposed(tmp_path: Path) -> None:
    made = built(attention(dtype=F32, dim=8), tmp_path)
    assert made.graph.file == "prefill.engine" and made.bytes == (tmp_path / "prefill.engine").stat().st_size
    assert [profile.name for profile in made.graph.profiles] == ["prefill"]


def test_only_what_kvcacheupdate_writes_is_in_place(tmp_path: Path) -> None:
    model = update()
    rows = helper.make_node("ScatterND", ["other", "where", "what"], ["other_out"], name="rows")
    model.graph.node.append(rows)
    for name, dtype, shape in (
        ("other", F16, ["b", 32]),
        ("where", I64, ["b", 2, 2]),
        ("what", F16, ["b", 2]),
    ):
        model.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))
    model.graph.output.append(helper.make_tensor_value_info("other_out", F16, ["b", 32]))
    made = built(model, tmp_path, aliases=(("cache", "m"), ("other", "other_out")))
    assert [alias.in_place for alias in made.graph.aliases] == [True, False]


def test_what_the_parser_refuses_is_told_with_node_and_layer(tmp_path: Path) -> None:
    nodes = [
        node("AffineGrid", "theta size", "grid"),
        helper.make_node("ScatterND", ["cache_3_keys_data", "at", "rows"], ["cache_3_keys_data_out"]),
        helper.make_node("Shape", ["grid"], ["s"]),
        helper.make_node("Cast", ["s"], ["at1"], to=I64),
        helper.make_node("Reshape", ["at1", "shape"], ["at"]),
    ]
    model = graph(
        [nodes[0], *nodes[2:], nodes[1]],
        {"theta": (F32, [1, 2, 3]), "cache_3_keys_data": (F32, [9, 9, 9, 9]), "rows": (F32, [1])},
        {"cache_3_keys_data_out": (F32, [9, 9, 9, 9])},
        {"size": (I64, [1, 1, 4, 4]), "shape": (I64, [1, 4])},
    )
    with pytest.raises(ExportError) as caught:
        built(model, tmp_path)
    text = str(caught.value)
    assert "does not take prefill.onnx:\n  - the_AffineGrid (AffineGrid, layer 3): " in text
    assert not (tmp_path / "prefill.engine").exists()


def test_what_the_builder_refuses_leaves_no_engine(tmp_path: Path) -> None:
    nodes = [helper.make_node("Size", ["x"], ["n"]), helper.make_node("Reshape", ["n", "one"], ["k"])]
    nodes.append(helper.make_node("TopK", ["x", "k"], ["v", "i"], axis=0))
    model = graph(nodes, {"x": (F32, [5000])}, {"v": (F32, ["n"]), "i": (I64, ["n"])}, {"one": (I64, [1])})
    with pytest.raises(ExportError, match=r"cannot build prefill.onnx:\n.*3840"):
        built(model, tmp_path)
    assert not (tmp_path / "prefill.engine").exists()


def test_targets_workspace_and_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvcompile"):
        one = built(attention(), tmp_path, Options(("SM89",), workspace_bytes=1 << 24))
        every = built(attention(), tmp_path)
    assert 0 < one.bytes < every.bytes
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("prefill.engine: ") for line in said)
    assert any(line.startswith("TensorRT: ") and line.endswith(" s") for line in said)
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_an_unknown_target_is_refused_before_the_file_is_read(tmp_path: Path) -> None:
    trt = adapter.load(("tensorrt_rtx_bindings",))
    ids = TensorInfo(name="input_ids", role="input_ids", dtype="int64", shape=("batch", "tokens"))
    logits = TensorInfo(name="logits", role="logits", dtype="float32", shape=("batch", "tokens", 8))
    unread = Graph(phase="step", file="step.onnx", inputs=(ids,), outputs=(logits,), aliases=())
    with pytest.raises(ExportError, match="SM90 is not among"):
        build(trt, tmp_path / "no.onnx", unread, Sizes(1, 1), Options(("SM90",)))
