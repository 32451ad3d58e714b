"""Which products are fast on this processor: those of bfloat16, or those of float32 after numbers were widened.

A processor with AVX-512 BF16 may multiply bfloat16 at half the speed of floats: a Sapphire Rapids without AMX does (168
GFLOP/s beside 310 on two cores). No flag of the processor says so, so it is measured.
"""

from __future__ import annotations

import threading
import time
from functools import cache

import torch

_ROWS, _CHANNELS = 128, 512  # 67 million operations, in less than a millisecond
_ROUNDS = 5  # by turns; the shortest count, so that another process on a core changes nothing
_FASTER = 1.3  # a factor: it is nearly two where floats are faster, and at most one where they are not


@cache
def floats_are_faster() -> bool:
    """Whether PyTorch's library multiplies float32 faster than bfloat16; measured once in a process, in milliseconds.

    In a thread of its own: who asks may be tracing, and tensors would be no real ones.
    """
    found: list[float] = []
    measuring = threading.Thread(target=lambda: found.append(_advantage()), name="kvcompile products")
    measuring.start()
    measuring.join()
    return bool(found) and found[0] > _FASTER


def _advantage() -> float:
    """How many times as long products of bfloat16 take."""
    least: dict[torch.dtype, float] = {torch.bfloat16: float("inf"), torch.float32: float("inf")}
    x = torch.linspace(-1, 1, _ROWS * _CHANNELS, device="cpu").reshape(_ROWS, _CHANNELS)
    weight = torch.linspace(-1, 1, _CHANNELS * _CHANNELS, device="cpu").reshape(_CHANNELS, _CHANNELS)
    given = {dtype: (x.to(dtype), weight.to(dtype).t()) for dtype in least}
    with torch.inference_mode():
        for dtype in least:
            torch.mm(*given[dtype])  # the library makes its code in the first call
        for _ in range(_ROUNDS):
            for dtype in least:
                began = time.perf_counter()
                torch.mm(*given[dtype])
                least[dtype] = min(least[dtype], time.perf_counter() - began)
    return least[torch.bfloat16] / least[torch.float32]
