"""`compile: {backend: torch_tensorrt}`: what goes to TensorRT, with which shapes and settings, and the same numbers.

torch_tensorrt itself needs an NVIDIA GPU even to import. Here a module stands in its place that takes what the real
`torch_tensorrt.dynamo.compile` and `Input` take, checks it, and runs the exported program: so which regions, which
inputs, their ranges and the calls are the real ones.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

import kvcompile
from kvcompile.backends import torch_tensorrt as emit
from kvcompile.backends.tensors_only import HasNumbers, tensors_only
from kvcompile.compile.inductor import ShapeClass, Tracer
from kvcompile.errors import CompileError, PlanError, RecipeError
from tests.support.models import tiny_hf

LAYERS = 3
# Of torch_tensorrt 2.13: what `dynamo.compile` is given must be among its arguments.
KNOWN = {
    *("device", "disable_tf32", "assume_dynamic_shape_support", "min_block_size", "truncate_double"),
    *("pass_through_build_failures", "use_fp32_acc"),
}


class Input:
    """As torch_tensorrt's: a shape, or the least, the best and the largest."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None = None,
        min_shape: tuple[int, ...] | None = None,
        opt_shape: tuple[int, ...] | None = None,
        max_shape: tuple[int, ...] | None = None,
    ):
        self.dtype = dtype
        least, best, largest = (s or shape for s in (min_shape, opt_shape, max_shape))
        assert least is not None and best is not None and largest is not None
        assert all(a <= b <= c for a, b, c in zip(least, best, largest, strict=True))
        self.min, self.max = least, largest


class Engines(nn.Module):
    """A compiled region: the exported program, behind the checks of an engine's profile."""

    def __init__(self, program: Any, inputs: list[Input], unsupported: str = ""):
        super().__init__()
        self.programs, self.inputs = [program], inputs  # a list: no part of the module
        self._run_on_acc_0 = nn.Module()
        if unsupported:
            self._run_on_gpu_1 = symbolic_trace(lambda x: torch.ops.aten.sin.default(x))

    def forward(self, *args: Tensor) -> Any:
        for tensor, known in zip(args, self.inputs, strict=True):
            assert isinstance(tensor, Tensor) and tensor.dtype == known.dtype
            assert len(tensor.shape) == len(known.min)
            assert all(a <= n <= b for a, n, b in zip(known.min, tensor.shape, known.max, strict=True))
        return self.programs[0](*args)


class Stand:
    """The stand-in, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.unsupported = ""
        self.fails = ""

    def compile(self, exported: Any, *, arg_inputs: list[Input], **more: Any) -> nn.Module:
        assert set(more) <= KNOWN
        if self.fails:
            raise RuntimeError(self.fails)
        for node in exported.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                assert node.target.namespace == "aten" and not node.target._schema.is_mutable
        self.asked.append(more)
        return Engines(exported.module(), arg_inputs, self.unsupported)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    made = Stand()
    module = types.ModuleType("torch_tensorrt")
    module.__version__ = "2.13.0"  # type: ignore[attr-defined]
    module.Input = Input  # type: ignore[attr-defined]
    module.dynamo = types.SimpleNamespace(compile=made.compile)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_tensorrt", module)
    monkeypatch.setattr(emit, "unavailable", lambda device: None)
    # Inductor's own work is tested elsewhere: the regions that stay with it run as they are.
    monkeypatch.setattr(emit, "compile_region", lambda module, inputs, tracer, mode: module)
    yield made


DECODERS = [
    ("gpt2", "int8", 3),
    pytest.param("llama", "paged_int8", 2, marks=pytest.mark.slow),
    pytest.param("gemma3", "streaming", 1, marks=pytest.mark.slow),
]


def optimize(model: nn.Module, recipe: str, **more: Any) -> Any:
    return kvcompile.optimize(model, recipe, **{"verify": "off", "max_batch": 4, "prefill_chunk": 16, **more})


@pytest.mark.parametrize(("kind", "recipe", "batch"), DECODERS)
def test_the_numbers_are_those_of_the_rewritten_graph(
    stand: Stand, kind: str, recipe: str, batch: int
) -> None:
    """A prompt in several passes, then single tokens; 2 sequences are the most there may be, so no range of them."""
    model = tiny_hf(kind, layers=2)
    limits = {"max_tokens": 96, "max_batch": max(batch, 2)}
    fast = optimize(model, recipe, compile={"backend": "torch_tensorrt", "kernels": "reference"}, **limits)
    plain = optimize(model, recipe, compile={"mode": "none"}, **limits)
    ids = torch.randint(3, 60, (batch, 21), generator=torch.Generator().manual_seed(batch))
    for _ in range(5):
        got, want = fast(ids).logits, plain(ids).logits
        assert torch.equal(got, want)  # the stand-in runs the very operations
        ids = want[:, -1:].argmax(-1)
    engines = [built for built in fast.executor.compiler.built if built.by == "torch_tensorrt"]
    assert len(engines) == len(stand.asked) and all(built.engines == 1 for built in engines)
    assert fast.plan.backend == "torch_tensorrt" and plain.plan.backend == "inductor"


def test_sites_stay_with_inductor_and_layers_share_an_engine(stand: Stand) -> None:
    fast = optimize(
        tiny_hf("llama", layers=LAYERS), "baseline", max_tokens=96, compile={"backend": "torch_tensorrt"}
    )
    regions = fast.executor.regions
    ops = [{str(n.target) for n in m.graph.nodes if "kvcompile" in str(n.target)} for m in regions.modules]
    assert ops.count({"kvcompile.cached_attention.default"}) == 1 and ops.count(set()) == 3
    assert len(regions.calls) == 2 * LAYERS + 1 and not regions.eager
    fast.warmup(batch=2)
    built = fast.executor.compiler.built
    by = [entry.by for entry in built]
    assert by.count("torch_tensorrt") == 6 and by.count("inductor") == 2  # prompt and decode step
    assert "writes the cache in place" in next(b.because for b in built if b.by == "inductor")
    first = next(entry for entry in built if entry.by == "torch_tensorrt")
    assert first.inputs[0] == ("int64", ((2, 4, 4), (2, 16, 16)))  # max_batch, prefill_chunk
    step = [entry for entry in built if entry.by == "torch_tensorrt"][3]
    assert step.inputs[0] == ("int64", ((2, 4, 4), 1))
    manifest = json.loads(json.dumps(fast.executor.compiler.manifest()))
    assert manifest["versions"]["torch_tensorrt"] == "2.13.0" and len(manifest["regions"]) == len(built)


def test_what_it_asks_for(stand: Stand) -> None:
    model = tiny_hf("llama", layers=1).half()
    fast = optimize(model, "baseline", max_tokens=96, compile={"backend": "torch_tensorrt"})
    fast.warmup(batch=1)
    assert all(asked["use_fp32_acc"] for asked in stand.asked)  # half-precision sums are float32, as torch's
    assert all(asked["pass_through_build_failures"] for asked in stand.asked)
    assert all(asked["disable_tf32"] for asked in stand.asked)
    assert not emit.settings(torch.bfloat16)["use_fp32_acc"]


def test_operations_without_a_converter_are_told(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    stand.unsupported = "sin"
    fast = optimize(
        tiny_hf("llama", layers=1), "baseline", max_tokens=96, compile={"backend": "torch_tensorrt"}
    )
    with caplog.at_level("WARNING"):
        fast.warmup(batch=1)
    assert "TensorRT has no form of aten.sin.default, which PyTorch runs" in caplog.text
    built = next(b for b in fast.executor.compiler.built if b.by == "torch_tensorrt")
    assert built.in_torch == {"aten.sin.default": 1}


def test_a_build_that_fails_is_an_error(stand: Stand) -> None:
    stand.fails = "no tactic"
    fast = optimize(
        tiny_hf("llama", layers=1), "baseline", max_tokens=96, compile={"backend": "torch_tensorrt"}
    )
    with pytest.raises(
        CompileError, match=r"torch_tensorrt could not compile Region0: RuntimeError: no tactic"
    ):
        fast.warmup(batch=1)


# ---- where it cannot be


def test_a_cpu_has_none() -> None:
    with pytest.raises(
        PlanError, match=r"backend: torch_tensorrt: TensorRT runs on NVIDIA GPUs alone.*on cpu"
    ):
        optimize(tiny_hf("llama", layers=1), "baseline", compile={"backend": "torch_tensorrt"})
    with pytest.raises(PlanError, match="NVIDIA GPUs alone"):
        kvcompile.explain(tiny_hf("llama", layers=1), "baseline", compile={"backend": "torch_tensorrt"})


def test_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    told = emit.unavailable(torch.device("cuda"))
    series = ".".join(torch.__version__.split(".")[:2])
    assert told is not None and "not installed" in told and f"torch-tensorrt=={series}.*" in told
    assert "backend: inductor" in told

    def broken(name: str) -> Any:
        # What the real one raises on a CPU torch.
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(emit.importlib, "import_module", broken)
    told = emit.unavailable(torch.device("cuda"))
    assert told is not None and "does not import (AssertionError: Torch not compiled with CUDA" in told


@pytest.mark.parametrize("mode", ["cudagraphs", "max-autotune", "none"])
def test_modes_of_inductor_are_refused(mode: str) -> None:
    with pytest.raises(RecipeError, match=f"backend: torch_tensorrt has no mode: {mode}"):
        kvcompile.Recipe.load({"name": "x", "compile": {"backend": "torch_tensorrt", "mode": mode}})


def test_explain_says_what_compiles_what(stand: Stand) -> None:
    told = str(
        kvcompile.explain(tiny_hf("llama", layers=1), "baseline", compile={"backend": "torch_tensorrt"})
    )
    assert "TensorRT engines between attention sites" in told and "Inductor: attention" in told
    assert "compiled by" not in str(kvcompile.explain(tiny_hf("llama", layers=1), "baseline"))


# ---- numbers of a region


def _region(build: Any, *values: Any) -> Any:
    from torch.fx import Graph, GraphModule

    graph = Graph()
    graph.output(build(graph, *[graph.placeholder(f"in_{i}") for i in range(len(values))]))
    return GraphModule(nn.Module(), graph)


def test_sizes_are_read_from_tensors() -> None:
    tracer = Tracer(ShapeClass(True, False, True))
    x = tracer.empty((1, tracer.tokens, 8), torch.float32, torch.device("cpu"))

    def build(graph: Any, x: Any, batch: Any, tokens: Any) -> Any:
        flat = graph.call_function(torch.ops.aten.reshape.default, (x, [batch, tokens, 2, 4]))
        return (tokens, flat, batch)

    inputs = [x, 1, tracer.tokens]
    module = _region(build, *inputs)
    region = tensors_only(module, inputs, tracer.run(module, inputs))
    assert region.inputs == (0,) and len(inspect.signature(region.module.forward).parameters) == 1
    run = region.bind(region.module)
    for tokens in (2, 9):
        given = torch.randn(1, tokens, 8)
        count, made, batch = run(given, 1, tokens)
        assert (count, batch) == (tokens, 1) and torch.equal(made, given.reshape(1, tokens, 2, 4))


def test_a_number_that_no_tensor_has_stays_out_of_engines() -> None:
    tracer = Tracer(ShapeClass(True, False, True))
    x = tracer.empty((1, 8), torch.float32, torch.device("cpu"))

    def build(graph: Any, x: Any, tokens: Any) -> Any:
        return (graph.call_function(torch.ops.aten.mul.Tensor, (x, tokens)),)

    inputs = [x, tracer.tokens]
    module = _region(build, *inputs)
    with pytest.raises(HasNumbers, match=r"in_1 is the number .*no dimension of a tensor"):
        tensors_only(module, inputs, tracer.run(module, inputs))
