"""Packing of small unsigned integers, without gaps.

A plane of w bits (1, 2 or 4) of n channels takes n * w / 8 bytes: byte c holds channel c in its lowest bits, channel
c + (n * w / 8) in the next, and so on. So channels that stand together in memory unpack with the same shift.
3 bits are a plane of their low 2 and then one of their high bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PLANES: dict[int, tuple[int, ...]] = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [..., n], each below 2^bits -> uint8 [..., n * bits / 8]."""
    planes, low = [], 0
    for width in _PLANES[bits]:
        plane = (codes >> low) & (2**width - 1)
        first, *others = plane.chunk(8 // width, dim=-1)
        for place, chunk in enumerate(others, start=1):
            first = first | (chunk << (place * width))
        planes.append(first)
        low += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def unpack(data: Tensor, bits: int) -> Tensor:
    """uint8 [..., n * bits / 8] -> codes uint8 [..., n]."""
    codes: Tensor | None = None
    channels, start, low = data.shape[-1] * 8 // bits, 0, 0
    for width in _PLANES[bits]:
        size = channels * width // 8
        plane = data[..., start : start + size]
        parts = [(plane >> shift) & (2**width - 1) for shift in range(0, 8, width)]
        found = torch.cat(parts, dim=-1) << low
        codes = found if codes is None else codes | found
        start, low = start + size, low + width
    assert codes is not None
    return codes
