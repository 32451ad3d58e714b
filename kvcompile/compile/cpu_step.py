"""A decode step on a CPU as one call: what its regions call is noted once, and called again without Python.

A step of a small model is some hundred calls of C++ code: generated kernels, and the loops that Inductor compiled.
Between them stand Python, PyTorch's dispatcher and allocations: a fifth of the step of a model of 135 million weights.

    first step of a key     runs as it is (kernels are compiled and loaded)
    second                  runs as it is, and its calls are noted, with the tensors that they have
    from then on            inputs are copied to where they stood, the calls are made (`kernels/cpp/include/step.h`)

So every step is computed exactly once, by the same code over the same cache: results are the same, bit for bit. The key
is as that of `cudagraph.py`. What a step allocates stays its own; weights and caches are read and written where they
stand, and when some stand elsewhere, all that was noted is forgotten.

Noted is a step that is made of nothing else: a region that asks for any other operator, or is no plain program of
Inductor's, runs as it did before.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._inductor.standalone_compile import CompiledArtifact
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompile.compile.generated import function_of
from kvcompile.kernels.cpp.host import ops
from kvcompile.kernels.cpp.host.step import NOTED, StepProgram

log = logging.getLogger(__name__)

Outputs = tuple[Tensor, ...]
Step = Callable[[dict[str, Any]], Outputs]
# Steps that are kept, each with the tensors that it computes: so many bytes of them, but so many steps in any case.
_BYTES, _LEAST = 64 << 20, 4
# Names that a program of Inductor's may ask for: what is under `torch` goes through the dispatcher, where it is seen.
_HARMLESS = {"torch", "device", "reinterpret_tensor", "assert_size_stride", "assert_alignment"}
_EMPTY, _ENTRY = "empty_strided_cpu", "kernel"
_OWN_THREADS = (b"GOMP_parallel", b"__kmpc_fork_call")


class _Otherwise(Exception):
    """Why a step cannot be noted."""


@dataclass(frozen=True, eq=False)
class _Known:
    """A step that was noted.

    names: of its calls: an op's, or that of a function of Inductor's
    kept:  what stays where it is while the program may run
    """

    program: StepProgram
    inputs: dict[str, Any]
    outputs: Outputs
    kept: list[Tensor]
    names: list[str]

    @cached_property
    def bytes(self) -> int:
        """Of the memory that is its own."""
        own = [*self.kept, *self.outputs, *(x for x in self.inputs.values() if isinstance(x, Tensor))]
        return sum({x.data_ptr(): x.untyped_storage().nbytes() for x in own}.values())


class CpuSteps:
    """The noted steps of one executor."""

    def __init__(self) -> None:
        self._place: Hashable = None
        self._seen: set[Hashable] = set()
        self._known: dict[Hashable, _Known] = {}
        self.problems: dict[Hashable, str] = {}  # by class of shapes: why its steps are not noted

    @property
    def count(self) -> int:
        """Steps that are noted now."""
        return len(self._known)

    def clear(self) -> None:
        """Forget all steps, and give their memory back."""
        self._seen, self._known, self._place = set(), {}, None

    def times(self) -> list[tuple[str, float]]:
        """The calls of the newest noted step and the seconds that each takes: they are made once more, for a profile.

        The step is computed again: what a cache keeps by scores is not to be trusted any more.
        """
        known = list(self._known.values())[-1]
        return list(zip(known.names, known.program.times(), strict=True))

    def run(
        self,
        shapes: Hashable,
        step: Step,
        programs: Sequence[Any],
        moving: dict[str, Any],
        fixed: dict[str, Tensor],
        version: int,
    ) -> Outputs:
        """What `step(moving | fixed)` gives; new tensors, which later steps leave alone.

        Args:
            shapes: what else the step's code depends on.
            programs: the compiled regions that `step` calls.
            moving: inputs that differ from step to step: tensors are copied, numbers are part of the key.
            fixed: tensors that stay where they are while `version` is the same.

        Raises:
            KernelError: a call of C++ code failed.
        """
        if shapes in self.problems or torch._C._len_torch_dispatch_stack():
            # Somebody wants to see the operators.
            return step({**moving, **fixed})
        place = (version, ops.forgotten(), tuple(map(Tensor.data_ptr, fixed.values())))
        if place != self._place:
            self.clear()
            self._place = place
        key = (shapes, *((name, _kind(value)) for name, value in moving.items()))
        if (known := self._known.pop(key, None)) is not None:
            self._known[key] = known  # the newest
            for name, value in moving.items():
                if isinstance(value, Tensor):
                    known.inputs[name].copy_(value)
            known.program.run()
            return tuple(map(_copy, known.outputs))
        if shapes not in self._seen:
            self._seen.add(shapes)
            return step({**moving, **fixed})
        with torch.inference_mode(False):  # what is made within cannot be written to without
            own = {name: x.clone() if isinstance(x, Tensor) else x for name, x in moving.items()}
        recorder = _Recorder()
        try:
            with recorder.patched(programs):
                outputs = recorder.run(lambda: step({**own, **fixed}))
        except _Otherwise as error:
            self.problems[shapes] = str(error)
            return step({**moving, **fixed})
        if recorder.problem:
            self.problems[shapes] = recorder.problem
            log.debug("steps of %s are not noted: %s", shapes, recorder.problem)
            return outputs
        self._known[key] = _Known(recorder.program, own, outputs, recorder.kept, recorder.names)
        while len(self._known) > _LEAST and sum(step.bytes for step in self._known.values()) > _BYTES:
            del self._known[next(iter(self._known))]
        log.debug("noted a step: %s, %d calls", shapes, len(recorder.program))
        return tuple(map(_copy, outputs))


class _Recorder(TorchDispatchMode):
    """Notes what a step calls, while it computes it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = StepProgram()
        self.kept: list[Tensor] = []
        self.names: list[str] = []  # of the calls that must have been noted
        self.problem = ""

    def run(self, step: Callable[[], Outputs]) -> Outputs:
        with self.program.noting(), self:
            outputs = step()
        if not self.problem and len(self.program) != len(self.names):
            self.problem = f"{len(self.names)} calls were expected, {len(self.program)} noted"
        return outputs

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in NOTED:
            self.names.append(str(func))
        elif not _is_view(func):
            self.problem = self.problem or f"it calls {func}"
        self.kept += [x for x in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(x, Tensor)]
        return out

    @contextmanager
    def patched(self, programs: Sequence[Any]) -> Iterator[None]:
        """Programs of Inductor's whose functions and memory are noted.

        Raises:
            _Otherwise: one is no plain program of Inductor's; nothing has run.
        """
        changes = [change for own in {id(p): p for p in programs}.values() for change in self._changes(own)]
        before = [(names, name, names[name]) for names, name, _ in changes]
        try:
            for names, name, new in changes:
                names[name] = new
            yield
        finally:
            for names, name, old in before:
                names[name] = old

    def _changes(self, program: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
        function = _function_of(program)
        names = function.__globals__
        for name in function.__code__.co_names:
            if name not in names or name in _HARMLESS:
                continue
            value = names[name]
            if name == _EMPTY:
                yield names, name, self._kept(value)
            elif isinstance(value, BuiltinFunctionType) and value.__name__ == _ENTRY:
                yield names, name, self._noted(name, value)
            elif not isinstance(value, Tensor):
                raise _Otherwise(f"it asks for {name}")

    def _kept(self, empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any) -> Tensor:
            out = empty(*args)
            self.kept.append(out)
            return out

        return made

    def _noted(self, name: str, kernel: Any) -> Callable[..., None]:
        address, alone = _entry(kernel)

        def call(*args: Any) -> None:
            kernel(*args)
            given = [x.data_ptr() if isinstance(x, Tensor) else x for x in args]
            if not all(type(x) is int for x in given) or not self.program.note_function(
                address, given, alone
            ):
                self.problem = self.problem or "it calls a function with other arguments than can be noted"
            self.names.append(name)

        return call


def _function_of(program: Any) -> FunctionType:
    """The Python function that Inductor wrote for a program.

    Raises:
        _Otherwise: there is none, or there is something around it.
    """
    own = getattr(program, "run", program)  # of one from a file
    if not isinstance(own, CompiledArtifact):
        raise _Otherwise("a region is no program of Inductor's")
    function = function_of(own)
    if (
        not isinstance(function, FunctionType)
        or function.__closure__
        or "partitions" in function.__code__.co_names
    ):
        raise _Otherwise("there is something around a program of Inductor's")
    return function


def _entry(kernel: Any) -> tuple[int, bool]:
    """The address of the C function behind a function of Inductor's, and whether it has threads of its own.

    Raises:
        _Otherwise: there is none.
    """
    path = getattr(kernel.__self__, "__file__", "")
    try:
        code = Path(path).read_bytes()
        address = ctypes.cast(getattr(ctypes.CDLL(path), _ENTRY), ctypes.c_void_p).value
    except (OSError, TypeError, AttributeError) as error:
        raise _Otherwise(f"a kernel of Inductor's cannot be found: {error}") from error
    assert address is not None
    return address, any(name in code for name in _OWN_THREADS)


def _is_view(op: OpOverload) -> bool:
    """Whether an operator computes nothing."""
    returns = op._schema.returns
    return bool(returns) and all(
        own.alias_info is not None and not own.alias_info.is_write for own in returns
    )


def _copy(x: Tensor) -> Tensor:
    """A copy by one thread: PyTorch shares out that of a vocabulary's logits, and waits for who is late."""
    if not x.is_contiguous():
        return x.clone()
    out = torch.empty_like(x)
    ctypes.memmove(out.data_ptr(), x.data_ptr(), x.nbytes)
    return out


def _kind(value: Any) -> Hashable:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
