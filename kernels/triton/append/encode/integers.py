"""Integers of 2, 3, 4 or 8 bits, every vector by itself (`layouts/storage/codes/integers.py`).

    int8:   q = round(x / s),         s = absmax / 127
    uint:   q = round((x - m) / s),   m = min, s = (max - min) / (2^bits - 1), per group of channels

Halves round to even; the scale as it is kept is what divides.
"""

from __future__ import annotations

from kvcompile.kernels.triton.append.encode.packing import packed
from kvcompile.kernels.triton.append.encode.tile import (
    Encoded,
    Store,
    Tile,
    clipped,
    divisor,
    kept_scale,
    quotient,
)
from kvcompile.layouts import Storage
from kvcompile.layouts.storage.scale import ScaleDtype


def int8(storage: Storage, tile: Tile) -> Encoded:
    lines = (
        "peak = tl.max(tl.abs(x), axis=1)",
        f"scale = {kept_scale(quotient('peak', '127.0'), storage.scale.dtype)}",
        f"divisor = {divisor('scale')}[:, None]",
        f"q = to_nearest_even({quotient('x', 'divisor')})",
    )
    data = Store("data", f"{clipped('q', 127.0)}.to(tl.int8)", tile.dim)
    decoded = f"{clipped('q', 127.0)} * scale.to(tl.float32)[:, None]"
    return Encoded(lines, (data, Store("scale", "scale")), decoded)


def affine(storage: Storage, tile: Tile) -> Encoded:
    """A group is a dimension of the tile, where a vector has more than one."""
    groups = storage.groups(tile.dim)
    if groups == 1:
        real = f"tl.arange(0, {tile.width})[None, :] < {tile.dim}" if tile.padded else None
        lines, codes = affine_codes("x", 1, "[:, None]", storage.element.bits, storage.scale.dtype, real)
        own = (Store("scale", "scale[:, None]", 1), Store("minimum", "minimum[:, None]", 1))
        lines.append(f"codes = {codes}")
        decoded = "codes.to(tl.float32) * scale.to(tl.float32)[:, None] + minimum.to(tl.float32)[:, None]"
    else:
        size = tile.dim // groups
        lines, codes = affine_codes("grouped", 2, "[:, :, None]", storage.element.bits, storage.scale.dtype)
        lines.insert(0, f"grouped = tl.reshape(x, [{tile.rows}, {tile.width // size}, {size}])")
        lines.append(f"codes = tl.reshape({codes}, [{tile.rows}, {tile.width}])")
        own = (Store("scale", "scale", groups), Store("minimum", "minimum", groups))
        shape = f"[{tile.rows}, {tile.width // size}, {size}]"
        decoded = f"tl.reshape(codes.to(tl.float32), {shape}) * scale.to(tl.float32)[:, :, None]"
        decoded = f"{decoded} + minimum.to(tl.float32)[:, :, None]"
        decoded = f"tl.reshape({decoded}, [{tile.rows}, {tile.width}])"
    more, data = packed("codes", storage.element.bits, tile)
    return Encoded((*lines, *more), (*data, *own), decoded)


def affine_codes(
    x: str, axis: int, spread: str, bits: int, dtype: ScaleDtype, real: str | None = None
) -> tuple[list[str], str]:
    """Statements that define `scale` and `minimum` of `x` along `axis`, and an expression of the codes, int32.

    spread: what gives `scale` the dimension back;  real: which elements count, where not all do
    """
    low, high = (x if real is None else f"tl.where({real}, {x}, {sign}float('inf'))" for sign in ("", "-"))
    lines = [
        f"low, high = tl.min({low}, axis={axis}), tl.max({high}, axis={axis})",
        f"minimum = {kept_scale('low', dtype)}",
        f"scale = {kept_scale(quotient('high - low', f'{2**bits - 1}.0'), dtype)}",
    ]
    lines += [
        f"divisor = {divisor('scale')}{spread}",
        f"q = to_nearest_even({quotient(f'{x} - minimum{spread}.to(tl.float32)', 'divisor')})",
    ]
    return lines, f"{clipped('q', 2.0**bits - 1, 0.0)}.to(tl.int32)"
