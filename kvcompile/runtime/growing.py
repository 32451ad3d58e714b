"""Memory that a cache has addresses for from the start, and takes as tokens come.

The buffers of layers that keep every token are as long as the limit of tokens. Addresses, strides, compiled code and
captured graphs stay as they are however long the text becomes, nothing is ever copied, and never more is held than the
tokens take, rounded up to pages.

On a CPU the buffers are mapped, not filled: the system gives a page of memory when something is first written to it,
and reads what nobody wrote as zeros. A GPU's driver is asked before a pass for what that pass may read or write
(`runtime/cuda_memory.py`).
"""

from __future__ import annotations

import math
import mmap
import platform
import sys
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from kvcompile.errors import LimitError
from kvcompile.runtime.cuda_memory import Driver, MappedRange, driver_of
from kvcompile.util.console import format_bytes

# What is smaller is allocated as it is: a page for each head would be more than the buffer.
LEAST = 1 << 18
LEAST_PIECES = 2  # of a GPU, for each head: with fewer, the first token would take all of it
PAGE = mmap.PAGESIZE
# No page file or memory is set aside for what may never be written (mmap(2)); the number is that of these machines.
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0


class Growing(Protocol):
    """How much memory a buffer [B, H, all slots, ..] has."""

    def hold(self, slots: int, last: int) -> None:
        """Let the first `slots` and the `last` ones of every head have memory; LimitError: there is no more."""

    def held(self, slots: int) -> int:
        """Bytes that the buffer has taken once its first `slots` were held and written."""


class FirstWritten:
    """On a CPU: a page takes memory when something is first written to it."""

    def __init__(self, buffer: Tensor):
        self._rows, self._slots = buffer.shape[0] * buffer.shape[1], buffer.shape[2]
        self._row, self._size = buffer[0, 0].nbytes, buffer.nbytes

    def hold(self, slots: int, last: int) -> None:
        """Ask nobody: writing is enough."""

    def held(self, slots: int) -> int:
        """Bytes of the pages that the first `slots` of every head lie in."""
        return min(self._size, self._rows * (-(-slots * self._row // (self._slots * PAGE)) * PAGE))


class AskedFor:
    """On a GPU: pieces take memory before a pass that may touch them."""

    def __init__(self, buffer: Tensor, memory: MappedRange):
        self._rows, self._slots = buffer.shape[0] * buffer.shape[1], buffer.shape[2]
        self._row, self._memory = buffer[0, 0].nbytes, memory
        self._first = self._last = 0  # slots of every head that have memory

    def hold(self, slots: int, last: int) -> None:
        """Let the first `slots` and the `last` ones of every head have memory."""
        slots, last = min(slots, self._slots), min(last, self._slots)
        slot = self._row // self._slots
        for row in range(self._rows):
            if slots > self._first:
                self._memory.hold(row * self._row, row * self._row + slots * slot)
            if last > self._last:
                self._memory.hold((row + 1) * self._row - last * slot, (row + 1) * self._row)
        self._first, self._last = max(slots, self._first), max(last, self._last)

    def held(self, slots: int) -> int:
        """Bytes of the pieces that have memory."""
        return self._memory.nbytes


def make_growing(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Growing] | None:
    """Zeros [B, H, slots, ..] that take memory as their slots are held; None: such a buffer is allocated at once.

    Raises:
        LimitError: there are no addresses for so many bytes.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and sys.platform != "win32" and size >= LEAST:
        buffer = growing_zeros(shape, dtype)
        return buffer, FirstWritten(buffer)
    driver = driver_of(device)
    if driver is None or size // (shape[0] * shape[1]) < LEAST_PIECES * driver.granularity:
        return None
    return make_asked_for(shape, dtype, driver)


def make_asked_for(shape: tuple[int, ...], dtype: torch.dtype, driver: Driver) -> tuple[Tensor, Growing]:
    """Zeros [B, H, slots, ..] of a GPU, which take memory as they are held.

    Raises:
        LimitError: there are no addresses for so many bytes, or no memory for the first piece.
    """
    memory = MappedRange(driver, math.prod(shape) * dtype.itemsize)
    buffer = memory.bytes().view(dtype).view(shape)
    return buffer, AskedFor(buffer, memory)


def growing_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU that take memory page by page as they are written, and give it back when the tensor is gone.

    Raises:
        LimitError: the system gives no addresses for so many bytes.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise LimitError(
            f"the system gives no addresses for a cache tensor of {format_bytes(size)}, shape {list(shape)} ({error}): "
            "set a lower runtime.max_tokens or max_batch, or raise the limit of addresses (ulimit -v)"
        ) from error
    # Huge pages would take 2 MiB for the first token of each head.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a system without huge pages does not know the word
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
