"""Every rule of `emit/tensorrt/capabilities.py`: graphs that break it, some that just do not, and what TensorRT says.

The graphs are single nodes. Where a rule refuses, so does a real build (or the parser); where it does not, an engine
comes out. So a rule that TensorRT no longer needs, or that is too narrow, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from kvcompile.emit.tensorrt import capabilities
from kvcompile.errors import ExportError

trt = pytest.importorskip("tensorrt_rtx_bindings")
F32, F16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
I8, I32, I64, U8, FP8 = (
    TensorProto.INT8,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT8,
    TensorProto.FLOAT8E4M3FN,
)
Shape = Sequence[int | str]


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, Shape]],
    outputs: dict[str, tuple[int, Shape]],
    constants: dict[str, tuple[int, list[int]]] | None = None,
    inner: dict[str, int] | None = None,
) -> onnx.ModelProto:
    """A model of a few nodes; constants are 1-D integers; inner: dtypes of values in between."""
    made = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in outputs.items()],
        [helper.make_tensor(n, dtype, [len(v)], v) for n, (dtype, v) in (constants or {}).items()],
        value_info=[helper.make_tensor_value_info(n, dtype, None) for n, dtype in (inner or {}).items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"the_{op}", **attributes)


def binary(op: str, dtype: int, **attributes: Any) -> onnx.ModelProto:
    ends = (dtype, ["b", 8])
    return graph([node(op, "x y", "z", **attributes)], {"x": ends, "y": ends}, {"z": ends})


def through(dtype: int) -> onnx.ModelProto:
    """fp32 -> dtype -> fp32."""
    nodes = [node("Cast", "x", "y", to=dtype), helper.make_node("Cast", ["y"], ["z"], to=F32, name="back")]
    return graph(nodes, {"x": (F32, ["b", 8])}, {"z": (F32, ["b", 8])}, inner={"y": dtype})


def scatter(dtype: int, **attributes: Any) -> onnx.ModelProto:
    inputs: dict[str, tuple[int, Shape]] = {
        "cache": (dtype, ["b", 32]),
        "at": (I64, ["b", 2, 2]),
        "rows": (dtype, ["b", 2]),
    }
    return graph(
        [node("ScatterND", "cache at rows", "out", **attributes)], inputs, {"out": (dtype, ["b", 32])}
    )


def topk(k: int) -> onnx.ModelProto:
    return graph(
        [node("TopK", "x k", "v i")],
        {"x": (F32, ["b", 5000])},
        {"v": (F32, ["b", k]), "i": (I64, ["b", k])},
        {"k": (I64, [k])},
    )


def attention(outputs: str = "o", **attributes: Any) -> onnx.ModelProto:
    shape: Shape = ["b", 2, "s", 64]
    inputs = dict.fromkeys(("q", "k", "v", "pk", "pv"), (F16, shape))
    given = "q k v"
    ends: dict[str, tuple[int, Shape]] = {"o": (F16, shape)}
    if outputs != "o":
        return graph(
            [helper.make_node("Attention", ["q", "k", "v", "", "pk", "pv"], outputs.split(), name="a")],
            inputs,
            ends | {name: (F16, ["b", 2, "t", 64]) for name in outputs.split()[1:]},
        )
    return graph(
        [node("Attention", given, outputs, **attributes)], {n: inputs[n] for n in given.split()}, ends
    )


def update(
    dtype: int = F16, mode: str = "linear", slots: int | str = 32, before: bool = False, after: bool = False
) -> onnx.ModelProto:
    """TensorScatter; before, after: with an operator between it and the graph's input, or output."""
    cache, new = (dtype, ["b", 2, slots, 8]), (dtype, ["b", 2, 3, 8])
    middle = [node("TensorScatter", f"{'n' if before else 'cache'} new at", "m", axis=-2, mode=mode)]
    nodes = [*([node("Neg", "cache", "n")] if before else []), *middle]
    out = "m"
    if after:
        nodes.append(helper.make_node("Neg", ["m"], ["o"], name="behind"))
        out = "o"
    return graph(
        nodes, {"cache": cache, "new": new, "at": (I64, ["b"])}, {out: cache}, inner={"n": dtype, "m": dtype}
    )


def flat_update() -> onnx.ModelProto:
    inputs: dict[str, tuple[int, Shape]] = {
        "cache": (F16, ["b", 2, 32]),
        "new": (F16, ["b", 2, 3]),
        "at": (I64, ["b"]),
    }
    return graph([node("TensorScatter", "cache new at", "o", axis=-1)], inputs, {"o": (F16, ["b", 2, 32])})


def matmul(dtype: int) -> onnx.ModelProto:
    return graph(
        [node("MatMul", "x y", "z")],
        {"x": (dtype, ["b", 64]), "y": (dtype, [64, 64])},
        {"z": (dtype, ["b", 64])},
    )


@dataclass(frozen=True)
class Case:
    """hits: graphs that break the rule; misses: graphs that just do not; targets: what is built for."""

    rule: str
    hits: tuple[Callable[[], onnx.ModelProto], ...]
    misses: tuple[Callable[[], onnx.ModelProto], ...]
    targets: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = field(default=("SM89",))  # where the hits are built all the same


CASES = (
    Case(
        "bits",
        (
            lambda: binary("BitwiseAnd", I32),
            lambda: binary("BitwiseXor", I32),
            lambda: binary("BitShift", U8, direction="LEFT"),
        ),
        (lambda: binary("And", TensorProto.BOOL), lambda: binary("Div", I32)),
    ),
    Case("bytes", (lambda: through(U8), lambda: scatter(U8)), (lambda: through(I8), lambda: scatter(I8))),
    Case("small-floats", (lambda: through(FP8), lambda: scatter(FP8)), (lambda: through(F16),)),
    Case("topk", (lambda: topk(3841),), (lambda: topk(3840),)),
    Case("softcap", (lambda: attention(softcap=30.0),), (lambda: attention(softcap=0.0), attention)),
    Case("attention-outputs", (lambda: attention("o pk2 pv2"),), (attention,)),
    Case("scatter-reduction", (lambda: scatter(F32, reduction="add"),), (lambda: scatter(F32),)),
    Case(
        "no-operator",
        (
            lambda: graph([node("NonZero", "x", "y")], {"x": (F32, ["b", 8])}, {"y": (I64, [2, "n"])}),
            lambda: graph([node("Unique", "x", "y")], {"x": (F32, ["b", 8])}, {"y": (F32, ["n"])}),
        ),
        (lambda: binary("Add", F32),),
    ),
    Case(
        "cache-update",
        (
            lambda: update(I8),
            lambda: update(mode="circular"),
            lambda: update(slots="t"),
            lambda: update(before=True),
            lambda: update(after=True),
            flat_update,
        ),
        (update, lambda: update(BF16), lambda: update(F32)),
    ),
    Case("turing-bf16", (lambda: matmul(BF16),), (lambda: matmul(F16),), ("SM75",)),
    Case("turing-fp32", (lambda: matmul(F32),), (lambda: matmul(F16),), ("SM75",)),
)


def refusal(model: onnx.ModelProto, targets: Sequence[str]) -> str | None:
    """What TensorRT itself says against a model; None: it builds an engine."""
    errors: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                errors.append(message)

    logger = Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model.SerializeToString()):
        return str(parser.get_error(0).desc())
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        value = network.get_input(number)
        if -1 in tuple(value.shape):
            profile.set_shape(value.name, *([n if s == -1 else s for s in value.shape] for n in (1, 2, 4)))
    config.add_optimization_profile(profile)
    if targets:
        config.num_compute_capabilities = len(targets)
        for place, name in enumerate(targets):
            config.set_compute_capability(trt.ComputeCapability.__members__[name], place)
    made = builder.build_serialized_network(network, config)
    return None if made is not None else " ".join(errors) or "no reason given"


def problems(model: onnx.ModelProto, targets: Sequence[str]) -> list[str]:
    return capabilities.problems(ir.from_proto(model), targets)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_refuses_what_tensorrt_refuses(case: Case) -> None:
    for hit in case.hits:
        found = problems(hit(), case.targets)
        assert len(found) >= 1 and any(line.endswith(f"[{case.rule}]") for line in found), found
        assert refusal(hit(), case.targets) is not None, f"TensorRT takes {hit()}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_takes_what_tensorrt_takes(case: Case) -> None:
    for miss in case.misses:
        assert problems(miss(), case.targets) == []
        assert refusal(miss(), case.targets) is None
    if case.targets:  # a rule of a GPU says nothing of others
        for hit in case.hits:
            assert problems(hit(), case.elsewhere) == []
            assert refusal(hit(), case.elsewhere) is None


def test_every_rule_has_a_case() -> None:
    assert [case.rule for case in CASES] == [rule.name for rule in capabilities.RULES]


def test_every_rule_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "tensorrt.md").read_text(encoding="utf-8")
    for rule in capabilities.RULES:
        assert f"`{rule.name}`" in text


def test_the_message_names_node_layer_reason_and_way_out() -> None:
    nodes = [
        helper.make_node("BitwiseAnd", ["x", "x"], ["low"], name="node_and_7"),
        helper.make_node("ScatterND", ["cache_3_keys_data", "at", "low"], ["cache_3_keys_data_out"]),
    ]
    model = graph(
        nodes,
        {"x": (I32, ["b", 2]), "cache_3_keys_data": (I32, ["b", 32]), "at": (I64, ["b", 2, 2])},
        {"cache_3_keys_data_out": (I32, ["b", 32])},
    )
    with pytest.raises(ExportError) as caught:
        capabilities.check(ir.from_proto(model), (), "step.onnx")
    assert str(caught.value) == (
        "TensorRT cannot hold step.onnx:\n"
        "  - node_and_7 (BitwiseAnd, layer 3): TensorRT has no BitwiseAnd; say it by quotients and remainders of int32 "
        "or fp32 numbers (kvcompile's own graphs do) [bits]"
    )
