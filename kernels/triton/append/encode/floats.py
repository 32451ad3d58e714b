"""Floating-point numbers: the model's dtype, another, fp8 (`layouts/storage/codes/fp8.py`).

fp8: q = x / s to nearest even, at most 448 (without a scale: the format's largest),   s = absmax / 448
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton.append.encode.tile import (
    Encoded,
    Store,
    Tile,
    clipped,
    divisor,
    kept_scale,
    quotient,
)
from kvcompile.kernels.triton.helpers import stored
from kvcompile.layouts import Storage

_TRITON = {"e4m3": "tl.float8e4nv", "e5m2": "tl.float8e5"}


def as_float(tile: Tile, dtype: str) -> Encoded:
    """The model's dtype, or another: what it cannot hold becomes its largest number."""
    largest = torch.finfo(getattr(torch, dtype)).max
    wider = torch.finfo(getattr(torch, tile.dtype)).max > largest
    x = clipped("x", largest) if wider else "x"
    number = stored(x, dtype, tile.interpreted)
    return Encoded((), (Store("data", number, tile.dim),), f"({number}).to(tl.float32)")


def fp8(storage: Storage, tile: Tile) -> Encoded:
    data = Store("data", _number("scaled", storage, tile), tile.dim)
    scaled = clipped(quotient("x", "divisor"), storage.largest)
    match storage.scale.per:
        case "none":
            return Encoded((f"scaled = {clipped('x', storage.largest)}",), (data,), _read("scaled", storage))
        case "tensor" | "head":
            side = tile.side
            head = f"tl.minimum(head, {tile.heads - 1})" if tile.surplus else "head"
            pointer = f"{side}_scale_ptr + batch * {side}_scale_s0 + {head} * {side}_scale_s1"
            read = f"tl.load({pointer}){'[:, None]' if tile.several else ''}"
            decoded = f"{_read('scaled', storage)} * divisor"
            return Encoded((f"divisor = {read}", f"scaled = {scaled}"), (data,), decoded)
        case _:
            lines = (
                "peak = tl.max(tl.abs(x), axis=1)",
                f"scale = {kept_scale(quotient('peak', '448.0'), storage.scale.dtype)}",
                f"divisor = {divisor('scale')}[:, None]",
                f"scaled = {scaled}",
            )
            decoded = f"{_read('scaled', storage)} * scale.to(tl.float32)[:, None]"
            return Encoded(lines, (data, Store("scale", "scale")), decoded)


def _read(x: str, storage: Storage) -> str:
    """What the number that `x` becomes is read as, float32.

    By arithmetic on bits of its own: ptxas of Triton 3.6 merges two pairs of numbers into a word as it makes them, and
    what else asks for the second pair reads a register that nobody wrote. On an H200 that was NaN.
    """
    return f"fp8_{storage.code}_bits(to_fp8_{storage.code}_bits({x})).to(tl.float32)"


def _number(x: str, storage: Storage, tile: Tile) -> str:
    if tile.fp8 == "bits":
        return f"to_fp8_{storage.code}_bits({x})"
    return f"{x}.to({_TRITON[storage.code]})"
