"""Codebooks: the code of the nearest level (`layouts/storage/code.py`), with a scale per group of channels.

s = absmax / largest, or the power of two below it,   code = how many thresholds lie below x / s
"""

from __future__ import annotations

import math

import numpy as np

from kvcompile.kernels.triton.append.encode.packing import packed
from kvcompile.kernels.triton.append.encode.tile import Encoded, Store, Tile, divisor, kept_scale, quotient
from kvcompile.kernels.triton.tile.code_values import codebook_number, scale_number
from kvcompile.layouts import Code, Storage


def codebook(storage: Storage, tile: Tile) -> Encoded:
    """A group is a dimension of the tile, where a vector has more than one."""
    groups, code = storage.groups(tile.dim), storage.element
    x, axis, spread = ("x", 1, "[:, None]") if groups == 1 else ("grouped", 2, "[:, :, None]")
    lines = []
    if groups > 1:
        size = tile.dim // groups
        lines.append(f"grouped = tl.reshape(x, [{tile.rows}, {tile.width // size}, {size}])")
    lines.append(f"peak = tl.max(tl.abs({x}), axis={axis})")
    lines.append(f"scale = {_scale(storage)}")
    if storage.scale.dtype == "e8m0":
        lines.append(f"divisor = {scale_number(storage.scale, 'scale')}{spread}")
    else:
        lines.append(f"divisor = {divisor('scale')}{spread}")
    lines += [f"q = {quotient(x, 'divisor')}", *_code(code)]
    lines.append(
        "codes = found" if groups == 1 else f"codes = tl.reshape(found, [{tile.rows}, {tile.width}])"
    )
    more, data = packed("codes", code.bits, tile)
    decoded = (
        f"{codebook_number(code, 'found')}.to(tl.float32) * {scale_number(storage.scale, 'scale')}{spread}"
    )
    if groups > 1:
        decoded = f"tl.reshape({decoded}, [{tile.rows}, {tile.width}])"
    own = Store("scale", "scale[:, None]", 1) if groups == 1 else Store("scale", "scale", groups)
    return Encoded((*lines, *more), (*data, own), decoded)


def _scale(storage: Storage) -> str:
    """The scale of elements whose largest magnitude is `peak`, as it is kept."""
    code = storage.element
    if storage.scale.dtype == "e8m0":
        return f"e8m0_of(peak, {math.frexp(code.largest)[1] - 1})"
    peak = "peak" if code.largest == 1.0 else quotient("peak", repr(code.largest))
    return kept_scale(peak, storage.scale.dtype)


def _code(code: Code) -> list[str]:
    """Statements that define `found`, the codes int32 of `q`."""
    # A number on a threshold that belongs to the upper level is above the float before the threshold.
    last = [
        np.nextafter(np.float32(t), np.float32(0)) if upper else np.float32(t) for t, upper in code.thresholds
    ]
    below = ", ".join(repr(float(threshold)) for threshold in last)
    if not code.signed:
        return [f"found = above{len(last)}(q, {below})"]
    sign = f"(q < 0.0).to(tl.int32) * {len(code.levels)}"
    return [f"found = above{len(last)}(tl.abs(q), {below}) + {sign}"]
