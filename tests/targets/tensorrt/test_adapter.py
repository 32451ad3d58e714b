"""Finding a TensorRT, choosing targets and profiles, and what is said where it cannot be."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import kvcompile
from kvcompile.errors import ExportError
from kvcompile.kernels.shared.dialect import TENSORRT
from kvcompile.pipeline import plan_for, understand
from kvcompile.recipe import Recipe
from kvcompile.targets.functional import functional
from kvcompile.targets.manifest import Graph, TensorInfo
from kvcompile.targets.tensorrt import adapter
from kvcompile.targets.tensorrt import write as target
from kvcompile.targets.tensorrt.options import Options
from kvcompile.targets.tensorrt.profiles import Sizes, profiles
from tests.support.models import TinyLlama, tiny_hf


def fake_module(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    return module


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in adapter.PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails


def test_without_tensorrt_every_package_is_named_with_its_reason_and_what_to_install(
    none_installed: None,
) -> None:
    with pytest.raises(ExportError) as caught:
        adapter.load()
    text = str(caught.value)
    assert all(f"  - {name}: " in text for name in adapter.PACKAGES)
    assert "pip install 'kvcompile[tensorrt]'" in text and "pypi.nvidia.com" in text


def test_without_tensorrt_nothing_is_written(none_installed: None, tmp_path: Path) -> None:
    out = tmp_path / "artifact"
    with pytest.raises(ExportError, match="TensorRT cannot be imported"):
        kvcompile.export(tiny_hf(layers=1), out, "tensorrt", verify="off")
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("name", adapter.PACKAGES)
def test_whichever_package_is_there_is_taken(
    none_installed: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = fake_module(
        name, Builder=object, OnnxParser=object, IBuilderConfig=object, __version__="10.15.1"
    )
    monkeypatch.setitem(sys.modules, name, module)
    found = adapter.load()
    assert (found.package, found.version, found.rtx, found.targets) == (name, "10.15.1", False, ())


def test_a_package_for_running_only_is_no_builder(
    none_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_module("tensorrt", __version__="10.0"))
    with pytest.raises(ExportError, match="tensorrt: no builder or ONNX parser in it"):
        adapter.load()


def test_targets_are_those_of_the_package() -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    trt = adapter.load(("tensorrt_rtx_bindings",))
    assert trt.rtx and trt.targets[:4] == ("SM75", "SM80", "SM86", "SM89")
    Options(("SM86", "SM89")).check(trt)
    with pytest.raises(ExportError, match="SM90 is not among those that tensorrt_rtx_bindings"):
        Options(("SM89", "SM90")).check(trt)
    with pytest.raises(ExportError, match="the same one twice"):
        Options(("SM89", "SM89")).check(trt)
    with pytest.raises(ExportError, match="workspace_bytes: expected at least 1, got 0"):
        Options(workspace_bytes=0).check(trt)


def test_the_enterprise_package_builds_for_its_own_gpu_only() -> None:
    module = fake_module("tensorrt", Builder=object, OnnxParser=object, IBuilderConfig=object)
    trt = adapter.TensorRT(module, "tensorrt", "10.15.1")
    with pytest.raises(ExportError, match=r"tensorrt 10.15.1 builds for the GPU that it runs on"):
        Options(("SM89",)).check(trt)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"precision": "fp16"},
            "options: 'precision' is not one of target tensorrt; it has: compute_capabilities",
        ),
        ({"workspace_bytes": "1G"}, "workspace_bytes: expected a number of bytes, got '1G'"),
        (
            {"compute_capabilities": 89, "package": "tensorrt_rtx_bindings"},
            "compute_capabilities: 89 is not among",
        ),
        (
            {"package": "trt"},
            "package: expected one of tensorrt, tensorrt_rtx, tensorrt_rtx_bindings, got 'trt'",
        ),
    ],
)
def test_unknown_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        target.ready(options)


def graph(phase: str) -> Graph:
    inputs = (
        TensorInfo(name="input_ids", role="input_ids", dtype="int64", shape=("batch", "tokens")),
        TensorInfo(name="keep", role="keep", dtype="int64", shape=("kept",)),
        TensorInfo(name="slots", role="slots", dtype="int64", shape=("slots",)),
        TensorInfo(name="table", role="page_table", dtype="int32", shape=("batch", 6)),
        TensorInfo(name="pool", role="cache", dtype="int8", shape=("pages_0", 2, 16, 8)),
        TensorInfo(name="fixed", role="cache", dtype="int8", shape=(2, 2)),
    )
    logits = TensorInfo(name="logits", role="logits", dtype="float32", shape=("batch", "tokens", 61))
    return Graph.model_validate(
        {"phase": phase, "file": f"{phase}.onnx", "inputs": inputs, "outputs": (logits,), "aliases": ()}
    )


def test_a_graph_for_both_phases_has_a_profile_for_each() -> None:
    decode, prefill = profiles(graph("step"), Sizes(batch=4, chunk=32, slots=96, pages={"pages_0": 25}))
    assert (decode.name, prefill.name) == ("decode", "prefill")
    assert "fixed" not in decode.shapes  # nothing of it is dynamic
    spans = {name: (span.min, span.opt, span.max) for name, span in decode.shapes.items()}
    assert spans == {
        "input_ids": ((1, 1), (4, 1), (4, 1)),
        "keep": ((1,), (1,), (1,)),
        "slots": ((1,), (48,), (96,)),
        "table": ((1, 6), (4, 6), (4, 6)),
        "pool": ((1, 2, 16, 8), (12, 2, 16, 8), (25, 2, 16, 8)),
    }
    assert prefill.shapes["input_ids"].max == (4, 32) and prefill.shapes["input_ids"].min == (1, 1)
    assert prefill.shapes["keep"].max == (32,)
    assert [p.name for p in profiles(graph("decode"), Sizes(1, 8, pages={"pages_0": 2}))] == ["decode"]
    with pytest.raises(ExportError, match="no range for the size 'pages_0' of pool"):
        profiles(graph("step"), Sizes(1, 8))


def sizes(cache: dict[str, object], **limits: int | None) -> Sizes:
    recipe = Recipe.load(
        {"cache": {"keys": {"dtype": "model"}, "values": {"dtype": "model"}, **cache}}, **limits
    )
    front = understand(TinyLlama().eval())
    return target.sizes_of(functional(front, plan_for(front, recipe), TENSORRT))


def test_sizes_follow_the_limits() -> None:
    full = {"retention": {"kind": "full"}}
    got = sizes(full, max_tokens=96, max_batch=3, prefill_chunk=16)
    assert (got.batch, got.chunk, got.slots, got.pages) == (3, 16, 96, {})
    assert sizes(full, max_tokens=96, max_batch=3, prefill_chunk=512).chunk == 96
    paged = {**full, "placement": {"kind": "paged", "page_size": 16}}
    got = sizes(paged, max_tokens=90, max_batch=3, prefill_chunk=16)
    assert got.pages == {"pages_0": 3 * 6 + 1}, "six pages of a sequence each, and one that nobody has"
    paged = {**full, "placement": {"kind": "paged", "page_size": 16, "pages": 9}}
    assert sizes(paged, max_tokens=90, max_batch=3, prefill_chunk=16).pages == {"pages_0": 10}


def test_scores_of_whole_prompts_need_the_longest_prompt() -> None:
    scored = {
        "placement": {"kind": "slots"},
        "retention": {"kind": "h2o", "sinks": 4, "heavy": 8, "recent": 8, "prefill": "full"},
    }
    assert sizes(scored, max_tokens=96, max_batch=1, prefill_chunk=16).chunk == 96
    with pytest.raises(ExportError, match=r"the longest: set runtime\.max_tokens, or prefill: bounded"):
        sizes(scored, max_tokens=None, max_batch=1, prefill_chunk=16)


@pytest.mark.parametrize(
    "raised, message",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (ExportError("TensorRT cannot hold step.onnx"), "TensorRT cannot hold step.onnx"),
    ],
)
def test_a_build_that_fails_leaves_what_was_there(
    raised: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    out = tmp_path / "artifact"
    out.mkdir()  # empty: an export may take it

    def half_written(trt: object, file: Path, *rest: object) -> None:
        file.with_suffix(".engine").write_bytes(b"half")
        raise raised

    emitted = SimpleNamespace(phase="step", file="step.onnx", graph=graph("step"), vocab=61)
    monkeypatch.setattr(target, "emit", lambda *_: emitted)
    monkeypatch.setattr(target, "checked", lambda *_: None)
    monkeypatch.setattr(target, "build", half_written)
    with pytest.raises(ExportError, match=message):
        kvcompile.export(
            TinyLlama().eval(),
            out,
            "tensorrt",
            verify="off",
            options={"package": "tensorrt_rtx_bindings"},
            max_tokens=64,
        )
    assert list(out.iterdir()) == [] and list(tmp_path.iterdir()) == [out]
