"""Codes into bytes, as `kernels/reference/packing.py` has them: a plane of w bits has channel c + i * D w / 8 in bits i
w of byte c.

3 bits are a plane of the low 2, and then one of the high bit.
"""

from __future__ import annotations

from kvcompile.kernels.triton.append.encode.tile import Store, Tile, power_of_two
from kvcompile.kernels.triton.tile.channel_blocks import PLANES


def packed(codes: str, bits: int, tile: Tile) -> tuple[list[str], tuple[Store, ...]]:
    """Statements, and what the part "data" gets of the codes int32 [rows, width] in the variable `codes`."""
    lines: list[str] = []
    stores: list[Store] = []
    first, low = 0, 0
    for width in PLANES[bits]:
        plane = codes if len(PLANES[bits]) == 1 else f"({codes} >> {low}) & {2**width - 1}"
        count = tile.dim * width // 8
        if width == 8:
            value = f"{codes}.to(tl.uint8)"
        elif not tile.padded:
            value = f"packed({plane}, {tile.rows}, {tile.width}, {width})"
        else:
            value = f"plane{low}"
            lines += _gathered(value, plane, count, width, tile)
        stores.append(Store("data", value, count, first))
        first, low = first + count, low + width
    return lines, tuple(stores)


def _gathered(name: str, plane: str, count: int, width: int, tile: Tile) -> list[str]:
    """Where the channels are no power of two, those of a byte stand in no block of their own."""
    shape = f"[{tile.rows}, {power_of_two(count)}]"
    terms = [
        f"(tl.gather({name}, byte + {place * count}, axis=1) << {place * width})"
        if place
        else f"tl.gather({name}, byte, axis=1)"
        for place in range(8 // width)
    ]
    return [
        f"byte = tl.broadcast_to(tl.arange(0, {power_of_two(count)})[None, :], {shape})",
        f"{name} = {plane}",
        f"{name} = ({' | '.join(terms)}).to(tl.uint8)",
    ]
