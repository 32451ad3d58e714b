"""Tracing a wrapped model into an exported program with free sizes, in one of two ways.

`export`          torch.export, non-strict: the model's Python runs as it is, on tensors of symbolic sizes. Python that
                  makes an int of a size (`len(t)`, `int(t.shape[1])`) is what it cannot follow: the size becomes a
                  constant, which is an error.
`strict export`   torch.export, strict: Dynamo interprets the Python, and follows such ints. It knows less of Python,
                  so it comes second.

Both give guards: what was taken for granted about sizes (passes/capture/guards.py says what becomes of them).
"""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvcompile.errors import CaptureError
from kvcompile.passes.capture.forward_notes import forward_notes
from kvcompile.passes.capture.inputs import CapturedInputs, Wrapper, example
from kvcompile.passes.capture.traced_once import Once
from kvcompile.util.own_code import TORCH
from kvcompile.util.tracing import quiet, uncollected

Way = Literal["export", "strict export"]
WAYS: tuple[Way, ...] = ("export", "strict export")
BATCH, SEQ, KEEP = 3, 11, 5  # example sizes: different, so that no two dynamic sizes share a symbol

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_DYNAMO = TORCH + "_dynamo" + os.sep
_LOGGERS = ("torch._dynamo", "torch._guards", "torch.export", "torch.fx.experimental.symbolic_shapes")


@dataclass(frozen=True)
class Traced:
    """An exported program, and for the guards that the model's own Python asked for, where (by id of the guard).

    once: set where equal layers were traced once: the program has marks in their places
    """

    program: ExportedProgram
    own: dict[int, str]
    once: Once | None = None


def trace(
    wrapper: Wrapper,
    inputs: CapturedInputs,
    device: torch.device,
    way: Way = "export",
    sizes: tuple[int, int] = (BATCH, SEQ),
    once: Once | None = None,
) -> Traced:
    """Trace with free sizes; an error where a size was specialised.

    once:  with which equal layers are traced once; only for `export`
    sizes: sequences and tokens of the example; Python that depends on them goes the way that it goes for these.
    """
    rank2 = {
        0: Dim.DYNAMIC,
        1: Dim.DYNAMIC,
    }  # ranges and equal sizes are inferred; specialisation is an error
    dims = {"input_ids": rank2, "position_ids": rank2, "logits_to_keep": {0: Dim.DYNAMIC}}
    names = inputs.names
    given = example(inputs, *sizes, KEEP, device)
    shapes = tuple(dims[name] for name in names)
    # export prints its half-made graph where it fails
    with (
        uncollected(),
        redirect_stderr(io.StringIO()),
        forward_notes(),
        _asked() as own,
        unanswered() as refused,
    ):
        if way == "export":
            once_each = _one_of_each(once, wrapper) if once is not None else nullcontext()
            with _symbolic_math(), _data_as_detached(), _masks_as_given(), once_each:
                program = torch.export.export(wrapper, given, dynamic_shapes=shapes, strict=False)
        else:
            with quiet(*_LOGGERS):
                program = torch.export.export(wrapper, given, dynamic_shapes=shapes, strict=True)
            own |= _asked_through_dynamo(program)
    if refused:
        raise CaptureError(
            f"the model's Python asks for the value of a tensor ({refused[0]}), which tracing cannot know, and goes on"
            " where it gets none: what it does with the value is not in the graph. Do not catch that error"
        )
    return Traced(program, own, once)


@contextmanager
def _one_of_each(once: Once, wrapper: Wrapper) -> Iterator[None]:
    """Equal layers are traced once; what fake tensors keep of each operator, to know it again, is then for nothing."""
    from torch._dynamo import config

    with once.patched(wrapper), config.patch(fake_tensor_cache_enabled=False):
        yield


@contextmanager
def _symbolic_math() -> Iterator[None]:
    """math.sqrt and the logarithms take sizes, as min, max and math.pow do within torch.export.

    A graph has no logarithm of a number, so it is one of a tensor without dimensions.
    """
    originals = {name: getattr(math, name) for name in ("sqrt", "log", "log2", "log10")}

    def logarithm(name: str) -> Callable[..., Any]:
        def of(x: Any, *base: float) -> Any:
            if not isinstance(x, _SYMBOLIC):
                return originals[name](x, *base)
            number: Any = x
            found = getattr(torch, name)(torch.scalar_tensor(number, dtype=torch.float64))
            return found / originals["log"](*base) if base else found

        return of

    patched = {name: logarithm(name) for name in ("log", "log2", "log10")}
    patched["sqrt"] = lambda x: torch.sym_sqrt(x) if isinstance(x, _SYMBOLIC) else originals["sqrt"](x)
    try:
        for name, function in patched.items():
            setattr(math, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(math, name, function)


@contextmanager
def _data_as_detached() -> Iterator[None]:
    """`x.data` is `x.detach()`, the same elements: export takes what `.data` gives for a constant."""
    original: Any = torch.Tensor.data

    def assigned(self: torch.Tensor, value: torch.Tensor) -> None:
        original.__set__(self, value)

    FakeTensor.data = property(lambda self: self.detach(), assigned)  # type: ignore[assignment]
    try:
        yield
    finally:
        del FakeTensor.data


@contextmanager
def _masks_as_given() -> Iterator[None]:
    """torch's TransformerEncoder and TransformerDecoder do not look whether the mask that they are given is causal.

    They look where nobody says so, at its values, for a hint by which a quicker kernel may be taken. Without the hint
    the mask itself is applied, which is the same.
    """
    home: Any = torch.nn.modules.transformer
    original = home._detect_is_causal_mask

    def by_hint(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    home._detect_is_causal_mask = by_hint
    try:
        yield
    finally:
        home._detect_is_causal_mask = original


@contextmanager
def _asked() -> Iterator[dict[int, str]]:
    """The guards that appear because Python outside of torch asks whether a condition on sizes holds."""
    found: dict[int, str] = {}
    originals = {kind: kind.__bool__ for kind in (torch.SymBool, torch.SymInt, torch.SymFloat)}

    def noting(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def asked(self: Any) -> bool:
            guards = getattr(self.node.shape_env, "guards", None)
            before = len(guards) if guards is not None else 0
            result = original(self)
            if guards is not None and len(guards) > before:
                frame = sys._getframe(1)
                if not frame.f_code.co_filename.startswith(TORCH):
                    where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                    found.update((id(guard), where) for guard in guards[before:])
            return result

        return asked

    kind: Any
    for kind, original in originals.items():
        kind.__bool__ = noting(original)
    try:
        yield found
    finally:
        for kind, original in originals.items():
            kind.__bool__ = original


@contextmanager
def unanswered() -> Iterator[list[str]]:
    """The lines that ask for a value which tracing cannot know. The error that they get ends it, if none catches it."""
    found: list[str] = []
    original = ShapeEnv._make_data_dependent_error

    def noting(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        found.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        return original(self, *args, **kwargs)

    ShapeEnv._make_data_dependent_error = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ShapeEnv._make_data_dependent_error = original  # type: ignore[method-assign]


def _asked_through_dynamo(program: ExportedProgram) -> dict[int, str]:
    """The guards that Dynamo made where the model's Python branches."""
    found = {}
    for guard in guards_of(program):
        location = guard.sloc.framework_loc
        file = location.filename if hasattr(location, "filename") else str(location)
        if file.startswith(_DYNAMO):
            line = str(guard.sloc.maybe_user_loc or guard.sloc).split("# ")[-1]
            found[id(guard)] = line.rsplit(os.sep, 1)[-1].strip()
    return found


def guards_of(program: ExportedProgram) -> list[Any]:
    """What was taken for granted about sizes."""
    env = shape_env(program)
    return [] if env is None else list(env.guards)


def shape_env(program: ExportedProgram) -> Any:
    """Where the sizes of a program's inputs are kept; None where none is free."""
    for node in program.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder" and isinstance(val, torch.Tensor):
            sizes: tuple[Any, ...] = tuple(val.shape)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    return size.node.shape_env
    return None
