"""Rounds scales as they are kept: a float16, a float32, or a power of two in a byte (e8m0; `storage/scale.py`).

e8m0: byte = floor(log2 absmax) - floor(log2 largest) + 127, at least 0; 255 where absmax is not a
number. What is infinite counts as the largest exponent there is.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.reference.codes.floats import clamped
from kvcompile.kernels.reference.packing import as_byte, from_byte
from kvcompile.kernels.shared.dialect import current
from kvcompile.layouts.storage import Scale

_BIAS, _NAN = 127, 255
_LEAST = 0x00400000  # the bits of 2^-127 in float32, which has no exponent for it


def kept(scale: Scale, absmax: Tensor, largest: float) -> Tensor:
    """The scale of vectors of magnitude `absmax` fp32, whose largest element becomes `largest`."""
    if scale.dtype != "e8m0":
        return clamped(absmax / largest, scale.torch_dtype)
    below = math.frexp(largest)[1] - 1
    if current().portable:
        exponent = _exponent(absmax) + (_BIAS - below)
        byte = torch.where(absmax != absmax, float(_NAN), exponent.clamp(min=0))
        return as_byte(byte)
    # The exponent of a float32 stands in its bits; that of what is not finite is 255, one more than the largest.
    bits = (absmax.contiguous().view(torch.int32) >> 23).clamp(max=_NAN - 1)
    byte = torch.where(absmax != absmax, _NAN, (bits - below).clamp(min=0))
    return byte.to(torch.uint8)


def numbers(scale: Scale, data: Tensor) -> Tensor:
    """Scales as they are kept -> fp32."""
    if scale.dtype != "e8m0":
        return data.float()
    if current().portable:
        table = torch.tensor([*(2.0 ** (e - _BIAS) for e in range(_NAN)), math.nan], device=data.device)
        return _looked_up(table, from_byte(data))
    byte = data.to(torch.int32)
    bits = torch.where(byte == _NAN, 0x7FC00000, torch.where(byte == 0, _LEAST, byte << 23))
    return bits.view(torch.float32)


def divisor(number: Tensor) -> Tensor:
    """What elements are divided by: their scale fp32, or 1 where that is 0."""
    return torch.where(number == 0, 1.0, number)


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 x) as fp32 for x >= 0, from -127 on: exact, where the logarithm is off by a rounding as well."""
    least, most = -_BIAS, 127
    found = torch.floor(torch.log2(x.clamp(min=2.0**least))).clamp(least, most)
    powers = torch.tensor([2.0**e for e in range(least, most + 1)], device=x.device)
    above = torch.tensor([*(2.0**e for e in range(least + 1, most + 1)), math.inf], device=x.device)
    found = found - (_looked_up(powers, found - least) > x.clamp(min=2.0**least)).float()
    return found + (_looked_up(above, found - least) <= x).float()


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index.to(torch.int64), table[:, None]).squeeze(-1)
