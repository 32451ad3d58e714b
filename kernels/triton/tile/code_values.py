"""What stored bytes stand for, as expressions: entries of codebooks, and scales."""

from __future__ import annotations

from kvcompile.layouts.storage import Code, Scale

# Helpers for codes whose bits are nearly those of a number: exact in float16.
_SHORTER = {"e2m1": "e2m1_number"}


def codebook_number(code: Code, name: str) -> str:
    """The block of codes `name` as a float: its entries, chosen bit by bit of the code, or what has a shorter way.

    Selects need no table in memory: 2^bits - 1 of them, half of them on constants.
    """
    if code.name in _SHORTER:
        return f"{_SHORTER[code.name]}({name})"
    return f"of_codebook{code.bits}({name}, {', '.join(repr(number) for number in code.numbers)})"


def scale_number(scale: Scale, loaded: str) -> str:
    """What is loaded of the parts "scale" and "minimum", as float32."""
    return f"e8m0_number({loaded})" if scale.dtype == "e8m0" else f"{loaded}.to(tl.float32)"
