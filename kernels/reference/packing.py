"""Packs small unsigned integers into bytes, without gaps.

A plane of w bits (1, 2 or 4) of n channels takes n * w / 8 bytes: byte c holds channel c in its lowest bits, channel
c + (n * w / 8) in the next, and so on. So channels that stand together in memory unpack with the same shift.
3 bits are a plane of their low 2 and then one of their high bit.

Where a target has no shifts (`kernels/shared/dialect.py`), the same by quotients of small whole numbers, which fp32 has
exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.shared.dialect import current

_PLANES: dict[int, tuple[int, ...]] = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [..., n], each below 2^bits -> uint8 [..., n * bits / 8]."""
    if current().portable:
        return as_byte(_packed(codes.float(), bits))
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
    """uint8 [..., n * bits / 8] -> codes uint8 [..., n]; whole numbers in fp32 where the dialect is portable."""
    if current().portable:
        return _unpacked(from_byte(data), bits)
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


def as_byte(codes: Tensor) -> Tensor:
    """Whole numbers 0 .. 255 in fp32 -> the dialect's byte; in int8, those from 128 are 256 less."""
    if current().byte == torch.int8:
        codes = codes - 256.0 * (codes >= 128).float()
    return codes.to(current().byte)


def from_byte(data: Tensor) -> Tensor:
    """The inverse of `as_byte`, fp32; of either byte."""
    codes: Tensor = data.float()
    return codes + 256.0 * (codes < 0).float() if data.dtype == torch.int8 else codes


def _packed(codes: Tensor, bits: int) -> Tensor:
    planes, low = [], 0
    for width in _PLANES[bits]:
        chunks = _field(codes, low, width).chunk(8 // width, dim=-1)
        weights = range(0, 8, width)
        planes.append(torch.stack([c * 2.0**w for c, w in zip(chunks, weights, strict=True)]).sum(0))
        low += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def _unpacked(data: Tensor, bits: int) -> Tensor:
    codes: Tensor | None = None
    channels, start, low = data.shape[-1] * 8 // bits, 0, 0
    for width in _PLANES[bits]:
        size = channels * width // 8
        plane = data[..., start : start + size]
        found = torch.cat([_field(plane, shift, width) for shift in range(0, 8, width)], dim=-1) * 2.0**low
        codes = found if codes is None else codes + found
        start, low = start + size, low + width
    assert codes is not None
    return codes


def _field(x: Tensor, low: int, width: int) -> Tensor:
    """`width` bits of whole numbers below 256 in fp32, from bit `low` on."""
    if width == 8:
        return x
    above = torch.floor(x * 2.0 ** -(low + width)) * 2.0**width
    return (torch.floor(x * 2.0**-low) if low else x) - above
