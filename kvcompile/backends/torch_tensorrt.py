"""Compiles what lies between attention sites with torch_tensorrt: `compile: {backend: torch_tensorrt}`.

| region | compiled by | because |
|---|---|---|
| between attention sites | TensorRT engines, by `torch_tensorrt.dynamo.compile` | it is a pure function |
| an attention site | Inductor (generated Triton kernels, or the reference) | it writes the cache in place |
| an opaque module | nobody | it runs as Python |

TensorRT engines are functions: they have no in-place writes outside of KVCacheUpdate, which torch_tensorrt has no
converter for, so caches never go through one. Weights are inputs of the engines, as they are of Inductor's regions: the
layers of a decoder share one engine, and no weight is held twice.

An engine is built for a range of shapes: batch 2 .. max_batch and tokens 2 .. prefill_chunk, or exactly one of either.
In float32, TF32 is used only where torch's own products use it; in float16, sums are float32 as torch's are.
Operations without a converter are run by PyTorch, between engines; `Built.in_torch` names them and a warning says so.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from kvcompile.backends.tensors_only import HasNumbers, TensorRegion, tensors_only
from kvcompile.compile.inductor import Compiled, Tracer, compile_region
from kvcompile.errors import CompileError
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe

log = logging.getLogger(__name__)

_SERIES = ".".join(torch.__version__.split(".")[:2])
_INSTALL = (
    f'pip install "torch-tensorrt=={_SERIES}.*" beside a CUDA build of torch {_SERIES} (with --extra-index-url '
    "https://pypi.nvidia.com for TensorRT itself), or use compile: {backend: inductor}"
)
_ENGINE = "_run_on_acc"  # what torch_tensorrt calls the parts of a module that are engines


@dataclass(frozen=True)
class Range:
    """Sizes that a dimension takes; the engine is tuned for `opt`."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class Built:
    """What was made of a distinct region for one class of shapes: an entry of the manifest.

    by:       "torch_tensorrt", or "inductor"
    because:  why Inductor
    inputs:   dtype, and the shape: a size, or [min, opt, max]
    engines:  TensorRT engines
    in_torch: operations that PyTorch runs between them, with how often
    settings: what torch_tensorrt was asked for
    """

    region: str
    by: str
    because: str = ""
    inputs: tuple[tuple[str, tuple[int | tuple[int, int, int], ...]], ...] = ()
    engines: int = 0
    in_torch: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def unavailable(device: torch.device) -> str | None:
    """Why torch_tensorrt cannot compile for `device`, and what to do instead; None: it can."""
    if device.type != "cuda":
        return (
            f"TensorRT runs on NVIDIA GPUs alone, and the model is on {device}: move it to a GPU before optimize, or "
            "use compile: {backend: inductor}"
        )
    try:
        importlib.import_module("torch_tensorrt")
    except ImportError as error:
        return f"torch_tensorrt is not installed ({error}): {_INSTALL}"
    except Exception as error:  # it raises what it likes where it does not fit torch, CUDA or TensorRT
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return (
            f"torch_tensorrt is installed and does not import ({type(error).__name__}: {reason}): {_INSTALL}"
        )
    return None


def describe() -> str:
    """What compiles what."""
    return (
        "torch_tensorrt: TensorRT engines between attention sites\n"
        "Inductor: attention, which writes the cache in place"
    )


def compiler(plan: Plan, recipe: Recipe) -> TorchTensorRT:
    """The region compiler, for the calls that the plan allows."""
    limits = plan.limits
    most = limits.max_tokens if plan.whole_prompts else limits.prefill_chunk
    return TorchTensorRT(limits.max_batch, most or limits.prefill_chunk, recipe.compile.mode)


class TorchTensorRT:
    """The region compiler of the backend."""

    def __init__(self, max_batch: int, max_tokens: int, mode: str = "default"):
        """
        max_batch, max_tokens: the most sequences of a call, and the most new tokens of one
        mode:                  Inductor's, for the regions that stay with it
        """
        self.mode = mode
        self.built: list[Built] = []
        tokens = Range(2, max(2, max_tokens), max(2, max_tokens))
        self.ranges = {
            "batch": Range(2, max(2, min(8, max_batch)), max(2, max_batch)),
            "tokens": tokens,
            "keep": Range(2, 2, tokens.max),
        }

    def __call__(self, module: GraphModule, inputs: Sequence[Any], tracer: Tracer) -> Compiled:
        """Compile one region for fake `inputs`.

        Raises:
            CompileError: torch_tensorrt failed; nothing else is tried.
        """
        name = type(module).__name__
        try:
            _check_pure(module)
            region = tensors_only(module, inputs, tracer.run(module, inputs))
            shapes = [self._shape(inputs[place], tracer) for place in region.inputs]
        except (_Impure, HasNumbers) as problem:
            self.built.append(Built(name, "inductor", str(problem)))
            return compile_region(module, inputs, tracer, self.mode)
        tensors = [inputs[place] for place in region.inputs]
        try:
            asked = settings(_floating(tensors))
            program, engines, in_torch = self._engines(region, tensors, shapes, asked)
        except Exception as error:
            raise CompileError(
                f"torch_tensorrt could not compile {name}: {type(error).__name__}: {error}. "
                "compile: {backend: inductor} compiles it without TensorRT."
            ) from error
        if in_torch:
            log.warning("%s: TensorRT has no form of %s, which PyTorch runs", name, ", ".join(in_torch))
        told = tuple(
            (str(x.dtype).removeprefix("torch."), tuple(_told(d) for d in s))
            for x, s in zip(tensors, shapes, strict=True)
        )
        self.built.append(Built(name, "torch_tensorrt", "", told, engines, in_torch, asked))
        return region.bind(program)

    def manifest(self) -> dict[str, Any]:
        """What was compiled by what, JSON-ready: versions, and each region's `Built`."""
        backend = importlib.import_module("torch_tensorrt")
        return {
            "backend": "torch_tensorrt",
            "versions": {"torch": torch.__version__, "torch_tensorrt": str(backend.__version__)},
            "regions": [asdict(built) for built in self.built],
        }

    def _shape(self, value: Tensor, tracer: Tracer) -> tuple[int | tuple[str, Range], ...]:
        """Each dimension: a size, or a name and its range."""
        names = {size.node.expr: name for name, size in tracer.symbols().items()}
        shape: list[int | tuple[str, Range]] = []
        sizes: tuple[Any, ...] = tuple(value.shape)
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                shape.append(size)
                continue
            known = names.get(size.node.expr)
            if known not in self.ranges:
                raise HasNumbers(f"an input has the size {size}, which has no bounds")
            bounds = self.ranges[known]
            shape.append(bounds.min if bounds.min == bounds.max else (known, bounds))
        return tuple(shape)

    def _engines(
        self,
        region: TensorRegion,
        tensors: Sequence[Tensor],
        shapes: Sequence[tuple[Any, ...]],
        asked: dict[str, Any],
    ) -> tuple[Compiled, int, dict[str, int]]:
        backend = importlib.import_module("torch_tensorrt")
        exported = export(region.module, tensors, shapes)
        inputs = [_input(backend, tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        compiled: GraphModule = backend.dynamo.compile(
            exported, arg_inputs=inputs, **asked, device=tensors[0].device
        )
        engines, rest = 0, Counter[str]()
        for name, part in compiled.named_children():
            if name.startswith(_ENGINE):
                engines += 1
            elif isinstance(part, GraphModule):
                rest.update(str(n.target) for n in part.graph.nodes if n.op == "call_function")
        return compiled, engines, dict(rest)


def settings(dtype: torch.dtype) -> dict[str, Any]:
    """What `torch_tensorrt.dynamo.compile` is asked for, for weights of `dtype`."""
    return {
        "min_block_size": 1,
        "assume_dynamic_shape_support": True,
        "pass_through_build_failures": True,  # else it would go on without TensorRT, and only log that
        "disable_tf32": not torch.backends.cuda.matmul.allow_tf32,
        "use_fp32_acc": dtype == torch.float16,
        "truncate_double": False,
    }


def export(
    module: GraphModule, tensors: Sequence[Tensor], shapes: Sequence[tuple[Any, ...]]
) -> ExportedProgram:
    """The region as torch_tensorrt takes it, its symbolic sizes named and in their ranges."""
    dims: dict[str, Any] = {}
    specs, examples = [], []
    with FakeTensorMode():
        for tensor, shape in zip(tensors, shapes, strict=True):
            spec = {}
            sizes = []
            for dim, size in enumerate(shape):
                if isinstance(size, int):
                    sizes.append(size)
                    continue
                name, bounds = size
                spec[dim] = dims.setdefault(name, Dim(name, min=bounds.min, max=bounds.max))
                sizes.append(min(bounds.max, bounds.min + 1 + list(dims).index(name)))
            specs.append(spec or None)
            examples.append(torch.empty(sizes, dtype=tensor.dtype, device=tensor.device))
    return torch.export.export(module, tuple(examples), dynamic_shapes=tuple(specs), strict=False)


class _Impure(Exception):
    """Why a region is no pure function of aten operations."""


def _check_pure(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.is_mutable:
            raise _Impure(f"{node.target} writes the cache in place, which no TensorRT engine can")
        if node.target.namespace not in ("aten", "prims"):
            raise _Impure(f"torch_tensorrt has no converter of {node.target}")


def _input(backend: Any, tensor: Tensor, shape: tuple[Any, ...]) -> Any:
    if all(isinstance(size, int) for size in shape):
        return backend.Input(shape=shape, dtype=tensor.dtype)
    bounds = {
        f"{which}_shape": tuple(s if isinstance(s, int) else getattr(s[1], which) for s in shape)
        for which in ("min", "opt", "max")
    }
    return backend.Input(**bounds, dtype=tensor.dtype)


def _told(size: Any) -> int | tuple[int, int, int]:
    return size if isinstance(size, int) else (size[1].min, size[1].opt, size[1].max)


def _floating(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the region's weights and activations."""
    found = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]
    return torch.float16 if torch.float16 in found else found[0] if found else torch.float32
