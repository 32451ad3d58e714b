"""Computes fp8 codes by arithmetic, for targets whose fp8 tensors cannot be scattered or gathered.

A number x of a format with m mantissa bits and exponent bias b has, with e = max(floor(log2 |x|), 1 - b),

    code = (e + b - 1) 2^m + round(|x| 2^(m - e)),   + 128 where x < 0

Subnormal numbers are those of the least e, and a mantissa that rounds up to 2^(m + 1) is the next exponent's first
number: neither is a case of its own. Nor is a logarithm that is off by rounding next to a power of two: both sides of
it round to that power. Codes are decoded by a table of the 256 numbers.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning", table 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.reference.packing import as_byte, from_byte
from kvcompile.kernels.shared.dialect import current

_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_BIAS = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 15}


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x fp32, at most the format's largest number, as the dialect stores it."""
    return to_code(x, dtype) if current().portable else x.to(dtype)


def numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored numbers as numbers: what the dialect keeps as codes is decoded."""
    return data if data.dtype == dtype else from_code(data, dtype)


def to_code(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, at most the format's largest number -> the bytes of `x.to(dtype)`, in the dialect's byte.

    A negative number that rounds to zero has the code of -0, as there; -0 itself that of 0.
    """
    mantissa, bias = _MANTISSA[dtype], _BIAS[dtype]
    x = x.float()
    size, least = x.abs(), 1 - bias
    exponent = torch.floor(torch.log2(size.clamp(min=2.0**least)))
    # By a table: targets need not have an exact power.
    highest = _highest(dtype)
    steps = torch.tensor([2.0 ** (mantissa - e) for e in range(least, highest + 2)], device=x.device)
    step = _looked_up(steps, (exponent - least).to(torch.int64))
    code = (exponent - least) * 2**mantissa + torch.round(size * step)
    return as_byte(code + 128.0 * (x < 0).float())


def from_code(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of fp8 numbers -> the numbers, fp32."""
    table = torch.tensor(_numbers(dtype), device=codes.device)
    return _looked_up(table, from_byte(codes).to(torch.int64))


def _numbers(dtype: torch.dtype) -> list[float]:
    """The numbers of the codes 0 .. 255. The last codes are infinite or none in fp8, and large here: none is stored."""
    mantissa, bias = _MANTISSA[dtype], _BIAS[dtype]
    found = []
    for code in range(256):
        exponent, digits = divmod(code % 128, 2**mantissa)
        digits += 2**mantissa if exponent else 0
        found.append((-1) ** (code // 128) * digits * 2.0 ** (max(exponent, 1) - bias - mantissa))
    return found


def _highest(dtype: torch.dtype) -> int:
    """The exponent of the largest number."""
    return math.frexp(torch.finfo(dtype).max)[1] - 1


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table[:, None]).squeeze(-1)
