"""Encodes elements as their code has them, and scales as they are kept: a file per kind of code (`storage/code.py`).

    codes_of   numbers that have been divided by their scale -> codes
    numbers    codes -> numbers

Codes that share bytes are packed by `packed`; those of kind float and fp8 are numbers already.
"""

from __future__ import annotations

from torch import Tensor

from kvcompile.kernels.reference.codes import codebook, floats, fp8, integers
from kvcompile.kernels.reference.packing import pack, unpack
from kvcompile.layouts.storage import Code


def codes_of(code: Code, x: Tensor, largest: float) -> Tensor:
    """x fp32 (of kind float: any), after its scale -> codes, one for each element.

    largest: what is beyond this magnitude becomes it
    """
    match code.kind:
        case "float":
            return x if code.dtype is None else floats.clamped(x, code.dtype)
        case "fp8":
            assert code.dtype is not None
            return fp8.stored(x.clamp(-largest, largest), code.dtype)
        case "int":
            return integers.signed(x, largest)
        case "uint":
            return integers.unsigned(x, largest)
        case "codebook":
            return codebook.nearest(code, x)


def packed(code: Code, codes: Tensor) -> Tensor:
    """Codes [..., n] as the part "data" has them."""
    return pack(codes, code.bits) if code.packed else codes


def numbers(code: Code, data: Tensor) -> Tensor:
    """The part "data" [..., width] -> numbers before their scale, one for each element; in some dtype."""
    match code.kind:
        case "fp8":
            assert code.dtype is not None
            return fp8.numbers(data, code.dtype)
        case "uint":
            return unpack(data, code.bits)
        case "codebook":
            return codebook.numbers(code, unpack(data, code.bits))
        case _:
            return data
