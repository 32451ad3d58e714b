"""Compiles regions with Inductor: each for one class of shapes, once, with no guards left to fail at run time.

A class of shapes fixes which of batch, new tokens and kept logits is exactly one (Inductor treats 1 apart) and
leaves the others symbolic. So a decode step and a prompt are two compilations, and no call makes a third.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from kvcompile.compile import ahead, gemv, linear_forms
from kvcompile.compile.rounding import rounding
from kvcompile.errors import CompileError
from kvcompile.kernels.cpp.isa import isa
from kvcompile.util.code_digest import code_digest
from kvcompile.util.faking import faking

log = logging.getLogger(__name__)

# Sizes that stand for the symbols while tracing: no size of a model should coincide with them. What holds for them is
# taken for all: so a span is below the fewest slots that have a symbol (65), and not in whole groups of tokens.
HINTS = {"batch": 11, "tokens": 61, "keep": 37, "span": 59}
_OTHER_HINT = 1009

# Elements of a loop that a thread must have, in a step of one token. A norm of a token is microseconds of one core;
# several wait for each other at the end of every loop, and for whatever else runs on their cores.
SERIAL = 1 << 14

Compiled = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class ShapeClass:
    """Which sizes are exactly one; the others are symbolic and at least two. `span` 0 is symbolic."""

    batch_is_one: bool
    tokens_is_one: bool
    keep_is_one: bool
    span: int = 0

    def __str__(self) -> str:
        phase = "decode" if self.tokens_is_one else "prefill"
        return f"{phase}, {'one sequence' if self.batch_is_one else 'a batch'}"


class Tracer:
    """Fake tensors of one shape class: the sizes are symbols of one ShapeEnv."""

    def __init__(self, shapes: ShapeClass):
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.free: set[Any] = set()  # symbols that must stay symbols
        self.batch = 1 if shapes.batch_is_one else self._symbol("batch")
        self.tokens = 1 if shapes.tokens_is_one else self._symbol("tokens")
        self.keep = 1 if shapes.keep_is_one else self._symbol("keep")
        self.span = shapes.span or self._symbol("span")
        self._others: dict[str, Any] = {}

    @property
    def one_token(self) -> bool:
        """Whether a call is one new token of one sequence."""
        return isinstance(self.batch, int) and isinstance(self.tokens, int)

    def size(self, name: str) -> Any:
        """A size by its name: one of the shape class, or any other, which is symbolic and at least two."""
        if name in HINTS:
            return getattr(self, name)
        if name not in self._others:
            self._others[name] = self._symbol(name, _OTHER_HINT + 2 * len(self._others))
        return self._others[name]

    def symbols(self) -> dict[str, Any]:
        """The sizes that are symbolic, by name."""
        found = {**{name: getattr(self, name) for name in HINTS}, **self._others}
        return {name: size for name, size in found.items() if isinstance(size, torch.SymInt)}

    def _symbol(self, name: str, hint: int = 0) -> Any:
        source, hint = ConstantSource(name), hint or HINTS[name]
        symbol = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self.free.add(symbol)
        return self.env.create_symintnode(symbol, hint=hint, source=source)

    def empty(self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def static(self, tensor: Tensor) -> Tensor:
        return self.mode.from_tensor(tensor, static_shapes=True)

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The module's outputs as fake tensors."""
        with faking(self.mode):
            return tuple(module(*inputs))


def describe(value: Any) -> str:
    """The metadata that a compilation depends on."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}"
    return f"{type(value).__name__}:{value}"


def compile_region(module: GraphModule, inputs: Sequence[Any], tracer: Tracer, mode: str) -> Compiled:
    """Compile one region for fake `inputs`.

    Raises:
        CompileError: Inductor failed, or it fixed a size that must stay free.
    """
    devices = {value.device for value in inputs if isinstance(value, Tensor)}
    on_cpu = all(device.type == "cpu" for device in devices)
    on_gpu = any(map(linear_forms.on_gpu, devices))
    if on_cpu or on_gpu:
        made = not (on_gpu and gemv.made_by_inductor(mode))
        module = gemv.with_gemv(module, on_gpu, norms=on_gpu and tracer.one_token, made=made)
    _import_inductor()

    def compiled() -> Compiled:
        with torch.no_grad(), tracing(TracingContext(tracer.mode)), _cached_for_this_code(), rounding():
            return torch._inductor.standalone_compile(
                module,
                list(inputs),
                dynamic_shapes="from_tracing_context",
                options={"config_patches": _patches(mode, on_cpu and tracer.one_token)},
            )

    try:
        artifact = ahead.compiling(compiled)
    except Exception as error:
        raise CompileError(
            f"Inductor could not compile {type(module).__name__}: {type(error).__name__}: {error}. "
            "compile: {mode: none} runs the rewritten graph without it."
        ) from error
    # torch makes symbols of its own, too, e.g. for a span that is the same in all calls.
    replaced = tracer.env.replacements.items()
    fixed = {str(symbol): str(value) for symbol, value in replaced if symbol in tracer.free}
    if fixed:
        raise CompileError(
            f"compiling {type(module).__name__} fixed sizes that must stay free: {fixed}. "
            "This is a defect of kvcompile; compile: {mode: none} runs the graph without compilation."
        )
    return artifact


@cache
def _import_inductor() -> None:
    """What takes Inductor a second at its first compilation is done while others look at instruction sets."""
    from torch._inductor import codecache, compile_fx  # noqa: F401

    with suppress(Exception):  # it asks again, and tells
        codecache.torch_key()
        codecache.CacheBase.get_system()


def _cached_for_this_code() -> AbstractContextManager[None]:
    """Inductor's caches know a graph by its ops; of what an op of ours does, which is our code, they see nothing.

    Nor of which kernels it calls: those of the instruction set.
    """
    tag, own = torch.compiler.config.cache_key_tag, ""
    with suppress(ValueError):  # a name that is none, which who asks for a kernel is told
        own = isa().name
    patched: AbstractContextManager[None] = torch.compiler.config.patch(  # type: ignore[attr-defined]
        cache_key_tag=f"{tag} kvcompile {code_digest()} {own}".strip()
    )
    return patched


def _patches(mode: str, serial: bool = False) -> dict[str, Any]:
    """What is asked of Inductor; serial: whether only large loops are for several threads."""
    options = dict(torch._inductor.list_mode_options(mode)) if mode == "max-autotune" else {}
    options |= {"triton.cudagraphs": False}  # of one region; `compile/cudagraph.py` makes them of all
    # standalone_compile would run each kernel once, on made-up inputs of the hinted sizes: a kernel that writes to
    # the slots of made-up positions writes anywhere. Nothing needs it: kernels are compiled all the same.
    options |= {"triton.autotune_at_compile_time": False}
    if serial:
        # What comes in are weights, whose sizes and strides are looked at before a step (`runtime/weights.py`), buffers
        # of ours, and what regions before gave: looking at each once more, in Python, is 3 % of a small model's step.
        options |= {"cpp.min_chunk_size": SERIAL, "size_asserts": False}
    # A scale is rounded to what is stored before it divides; without this, the rounding is optimized away.
    return options | {"emulate_precision_casts": True}
