"""Memory that a cache has addresses for from the start, and takes as tokens come.

The buffers of layers that keep every token are as long as the limit of tokens. On a CPU they are mapped, not filled:
the system gives a page of memory when something is first written to it, and reads what nobody wrote as zeros. So
addresses, strides and compiled code stay as they are however long the text becomes, nothing is ever copied, and never
more is held than the tokens take, rounded up to pages. A GPU's memory is allocated for the limit.
"""

from __future__ import annotations

import math
import mmap
import platform
import sys
from contextlib import suppress

import torch
from torch import Tensor

from kvcompile.console import format_bytes
from kvcompile.errors import LimitError

# What is smaller is allocated as it is: a page for each head would be more than the buffer.
LEAST = 1 << 18
PAGE = mmap.PAGESIZE
# No page file or memory is set aside for what may never be written (mmap(2)); the number is that of these machines.
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0


def can_grow(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a buffer [B, H, slots, ..] takes memory as its slots are written."""
    return device.type == "cpu" and sys.platform != "win32" and math.prod(shape) * dtype.itemsize >= LEAST


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


def held(buffer: Tensor, slots: int) -> int:
    """Bytes of memory that a growing buffer [B, H, all slots, ..] has taken once its first `slots` were written."""
    rows = buffer.shape[0] * buffer.shape[1]
    row = buffer[0, 0].nbytes
    return min(buffer.nbytes, rows * (-(-slots * row // (buffer.shape[2] * PAGE)) * PAGE))
