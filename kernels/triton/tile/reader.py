"""Chooses how a tile of the site's keys or values is read: its pieces, whether as words, what its scales multiply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvcompile.kernels.triton.spec import DotType, KernelSpec
from kvcompile.kernels.triton.tile import dot_dtype, latent
from kvcompile.kernels.triton.tile.channel_blocks import (
    NARROW,
    ONE_WARP,
    SMALLEST,
    ChannelBlock,
    between,
    edges,
    in_words,
    step_in_words,
    wider,
)
from kvcompile.kernels.triton.tile.stacking import filled, stacks, takes_scales
from kvcompile.kernels.triton.tile.tile_loader import TileLoader
from kvcompile.layouts import InKeys, Paged, Storage


def reader(
    spec: KernelSpec,
    side: str,
    pieces: tuple[ChannelBlock, ...] | None = None,
    *,
    elementwise: bool = False,
    cuts: Iterable[int] = (),
) -> TileLoader:
    """The reader of the site's keys or values.

    pieces: instead of those that suit the storage best; cuts: channels before which one of these must end
    """
    stored = spec.as_read.keys if side == "keys" else spec.as_read.values
    dim = spec.head_dim if side == "keys" else spec.v_head_dim
    assert not isinstance(stored, InKeys), "such values are read from the keys"
    kept = stored.of_slots
    dot = dot_dtype.of_model(spec) if elementwise or kept.channelwise else dot_dtype.of_codes(kept, spec)
    own = side == "keys" and not elementwise
    whole = _whole_groups(spec, spec.block_n)
    if kept.channelwise and own and (kept.group % spec.block_n == 0 or whole):
        dot = dot_dtype.of_codes(kept, spec)
    stack = stacks(spec.role, spec.site, spec.head_dim, spec.v_head_dim, spec.group, spec.torch_dtype)
    by_group = _by_group(spec, kept, dim, dot, elementwise)
    # Keys that are values as well.
    shared = spec.layout.in_keys and spec.role != "columns" and not pieces
    marks = [*edges(kept, dim, stack > 1 or by_group or (elementwise and shared)), *cuts]
    assembly = "interpreted" not in spec.options and dot == "float16"
    made = TileLoader(
        side,
        kept,
        dim,
        (),
        dot,
        spec.dtype,
        spec.fp8,
        spec.block_n,
        elementwise,
        assembly,
        stack=stack,
        by_group=by_group,
        joint=spec.role != "columns",
        whole=whole,
        lowest=side == "keys" and spec.role == "decode" and not spec.layout.in_keys,
    )
    made = replace(made, once=latent.made_once(made, spec, bool(pieces)))
    if shared and elementwise and made.once:
        planes = range(0, dim, made.row_bytes)
        marks += [
            plane + step for plane in planes for step in range(latent.WIDEST, made.row_bytes, latent.WIDEST)
        ]
    words = () if pieces or not _in_words(made, spec) else in_words(dim, marks)
    if not pieces:
        # Of few slots in one group, a tile is the work of a single warp.
        alone = words and whole and spec.layout.keys.group == spec.block_n <= ONE_WARP
        pieces = words or between(dim, marks)
        if shared or ((words or stack > 1) and side == "values" and spec.role == "decode"):
            pieces = pieces if alone else wider(pieces, spec.block_m * stack)
    return replace(made, pieces=pieces, words=bool(words))


def _by_group(spec: KernelSpec, kept: Storage, dim: int, dot: DotType, elementwise: bool) -> bool:
    """Whether codes take the scales of their groups of channels: those of many queries, if all pieces are whole.

    Of a step, where its heads fill the rows of a product (`stacking.filled`).
    """
    if elementwise or dot != "float16":
        return False
    if spec.layout.in_keys:
        return latent.by_group(spec)
    step = spec.role == "decode"
    if step and not filled(
        spec.role, spec.site, spec.head_dim, spec.v_head_dim, spec.group, spec.torch_dtype
    ):
        return False
    return takes_scales(kept, dim, spec.torch_dtype, step)


def _whole_groups(spec: KernelSpec, block_n: int) -> bool:
    """Whether codes of keys that share scales per channel take these in a tile of so many slots (`affine`).

    It has whole groups, several or, of a step, one: then it is the work of a single warp, and what would scale queries
    would wait for them.
    """
    kept, placement = spec.as_read.keys.of_slots, spec.as_read.placement
    in_page = not isinstance(placement, Paged) or placement.page_size % kept.group == 0
    whole = kept.channelwise and block_n % kept.group == 0
    whole = whole and (block_n > kept.group or spec.role == "decode")
    plain = kept.element.kind == "uint" and kept.element.bits in (2, 4, 8) and kept.scale.dtype == "float16"
    if kept.element.bits == 2 and not _step_in_words(spec):
        return False
    packs = spec.head_dim * kept.element.bits % 16 == 0 and spec.head_dim % 2 == 0
    chosen = spec.layout.selection.selects
    return (
        whole
        and in_page
        and plain
        and packs
        and spec.role != "columns"
        and spec.dtype != "float32"
        and not chosen
    )


def _step_in_words(spec: KernelSpec) -> bool:
    """Whether keys of 2 bits may be read in words of short rows."""
    stack = stacks(spec.role, spec.site, spec.head_dim, spec.v_head_dim, spec.group, spec.torch_dtype)
    return step_in_words(spec.role, spec.layout.keys, spec.head_dim, stack * spec.group)


def _in_words(part: TileLoader, spec: KernelSpec) -> bool:
    """Whether codes become float16 as they stand, so that two of a word fill the two halves of two registers."""
    element = part.storage.element
    if part.storage.channelwise and part.side == "keys" and not part.elementwise and not part.folded:
        return _whole_groups(spec, spec.block_n)
    plain = element.kind in ("int", "uint", "fp8") and element.bits in (2, 4, 8)
    if element.bits == 2 and part.row_bytes < NARROW:
        # Values beside keys that are read so.
        beside = _step_in_words(spec) and _whole_groups(spec, spec.block_n)
        if not (beside and part.row_bytes >= SMALLEST):
            return False
    # Pieces of one group are too narrow to be halved.
    alone = part.stack > 1 or part.by_group or element.bits == 8 or part.storage.groups(part.dim) == 1
    return plain and alone and part.dot == "float16" and not part.by_element and part.row_bytes % 2 == 0
