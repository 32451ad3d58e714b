"""Keys that are values as well (MLA): how one tile of codes is read for the products of scores and those of values."""

from __future__ import annotations

from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile.channel_blocks import edges, in_words
from kvcompile.kernels.triton.tile.tile_loader import TileLoader

# Channels of a piece that is dequantized element by element and made once, at most: in float32 it takes registers.
WIDEST = 128


def made_once(part: TileLoader, spec: KernelSpec, turned: bool) -> bool:
    """Whether the codes of keys that are values as well become numbers once (`TileLoader.once`).

    Codes of 8 bits alone are so soon in the form of each product that this takes more.
    """
    if not spec.layout.in_keys or spec.role == "columns" or turned or part.storage.element.kind == "float":
        return False
    return part.elementwise or part.by_group or spec.layout.in_full


def by_group(spec: KernelSpec) -> bool:
    """Whether codes that are keys and values at once take the scales of their groups in float16: those of a step, if
    pieces have whole groups."""
    kept, dim = spec.layout.keys.of_slots, spec.head_dim
    element, count = kept.element, kept.groups(dim)
    plain = element.kind == "uint" and element.bits in (4, 8) and kept.scale.dtype == "float16"
    if (
        spec.role != "decode"
        or kept.scale.per != "group"
        or count == 1
        or not plain
        or spec.dtype == "float32"
    ):
        return False
    size = dim // count
    pieces = in_words(dim, [*edges(kept, dim, True), spec.v_head_dim])
    return bool(pieces) and all(
        (piece.start - piece.start % 2) % size == 0 and 2 * piece.width % size == 0 for piece in pieces
    )
