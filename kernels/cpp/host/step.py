"""A decode step as a list of calls of C++ code, noted while they are made, and made again (`include/step.h`)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.host import ops

# Ops whose calls are one call of a kernel each.
NOTED = (ops.cpp_attend, ops.cpp_linear, ops.cpp_linears)
_MESSAGE = 4096


class StepProgram:
    """The calls of one step. What they read and write must stand where it stood when they were noted."""

    def __init__(self) -> None:
        """Raises KernelError where the launcher cannot be loaded."""
        self._library = _library()
        self._program = self._library.kvcompile_step_new()
        weakref.finalize(self, self._library.kvcompile_step_free, self._program)

    def __len__(self) -> int:
        return int(self._library.kvcompile_step_size(self._program))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note every kernel that this thread's ops of NOTED call."""
        self._library.kvcompile_step_note(self._program)
        try:
            yield
        finally:
            self._library.kvcompile_step_note(None)

    def note_function(self, address: int, arguments: Sequence[int], alone: bool) -> bool:
        """Note a C function of addresses and whole numbers of 8 bytes; whether it has no more than can be noted.

        Args:
            alone: it has threads of its own, so no others are there while it runs.
        """
        given = (ctypes.c_int64 * len(arguments))(*arguments)
        return bool(
            self._library.kvcompile_step_function(self._program, address, given, len(arguments), alone)
        )

    def run(self) -> None:
        """Make the calls, in their order, with PyTorch's threads.

        Raises:
            KernelError: one of them failed; those before it were made.
        """
        self._run(None)

    def times(self) -> list[float]:
        """The same; the seconds that each call took. Raises as `run`."""
        took = (ctypes.c_int64 * len(self))()
        self._run(took)
        return [own * 1e-9 for own in took]

    def _run(self, took: ctypes.Array[ctypes.c_int64] | None) -> None:
        message = ctypes.create_string_buffer(_MESSAGE)
        if not self._library.kvcompile_step_run(self._program, message, _MESSAGE, took):
            raise KernelError(f"a decode step failed: {message.value.decode(errors='replace')}")


@cache
def _library() -> ctypes.CDLL:
    library = ops.ready()
    library.kvcompile_step_new.restype = ctypes.c_void_p
    library.kvcompile_step_free.argtypes = [ctypes.c_void_p]
    library.kvcompile_step_note.argtypes = [ctypes.c_void_p]
    library.kvcompile_step_size.argtypes = [ctypes.c_void_p]
    library.kvcompile_step_size.restype = ctypes.c_int64
    library.kvcompile_step_function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_int64,
        ctypes.c_bool,
    ]
    library.kvcompile_step_function.restype = ctypes.c_bool
    library.kvcompile_step_run.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int64),
    ]
    library.kvcompile_step_run.restype = ctypes.c_bool
    return library
