"""Pieces: the ranges of channels in which a vector is read, each a power of two wide, as Triton's blocks are.

A head of 128 channels is one piece, one of 576 (MLA's latent) is 512 + 64, one of 80 is 64 + 16; what is left below 32
is one, padded: 16 + 8 would be as many columns. Bits that are packed in planes (`kernels/reference/packing.py`) have a
piece for each shift, so that every element of a piece unpacks alike, and one for each group of channels that has a
scale of its own. What becomes float16 is read as words of two bytes (`in_words`): then a register of a product, which
holds two numbers, is filled from one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from kvcompile.layouts import Storage

# Bits of the planes that codes of so many bits are packed in, as kernels/reference/packing.py packs.
PLANES: dict[int, tuple[int, ...]] = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}
# Bytes of a row of 2 bits, below which the words of one plane are too few columns for four warps; tokens of a group.
NARROW = 64
ONE_WARP = 32  # slots of a tile that a single warp has
SMALLEST = 16  # what a product takes at least; narrower pieces are padded with zeros


@dataclass(frozen=True)
class ChannelBlock:
    """Channels start, start + step, ... of a vector, `width` of them.

    least: columns of its block, at least
    """

    start: int
    width: int
    step: int = 1
    least: int = SMALLEST

    @property
    def block(self) -> int:
        """Width of the block that holds it."""
        return max(self.least, 1 << (self.width - 1).bit_length())

    @property
    def whole(self) -> bool:
        return self.block == self.width

    @property
    def stop(self) -> int:
        """Behind its last channel."""
        return self.start + self.step * (self.width - 1) + 1


def split(start: int, stop: int) -> list[ChannelBlock]:
    """Channels start .. stop - 1 as pieces, the widest first."""
    found = []
    while start < stop:
        width = 1 << ((stop - start).bit_length() - 1)
        if stop - start < 2 * SMALLEST:
            width = stop - start  # padded in one: in two, they would be as many columns
        found.append(ChannelBlock(start, width))
        start += width
    return found


def between(dim: int, edges: Iterable[int]) -> tuple[ChannelBlock, ...]:
    """All `dim` channels, in pieces that cross none of `edges`."""
    marks = sorted({0, dim, *(edge for edge in edges if 0 < edge < dim)})
    return tuple(piece for a, b in pairwise(marks) for piece in split(a, b))


def in_words(dim: int, edges: Iterable[int]) -> tuple[ChannelBlock, ...]:
    """All `dim` channels as `between`, each piece taken apart into its even and its odd channels; () where an edge is
    odd.

    What is read as words of two bytes has two channels in one: those of a piece stand in the same byte of their words.
    """
    marks = sorted({0, dim, *(edge for edge in edges if 0 < edge < dim)})
    if any(mark % 2 for mark in marks):
        return ()
    return tuple(
        ChannelBlock(a + 2 * piece.start + odd, piece.width, 2)
        for a, b in pairwise(marks)
        for piece in split(0, (b - a) // 2)
        for odd in (0, 1)
    )


def in_pairs(dim: int, start: int, rotary_dim: int, interleaved: bool) -> tuple[ChannelBlock, ...]:
    """Channels so that those a rotary embedding turns with each other are pieces 0 and 1, 2 and 3, ...; then the rest.

    The number of such pieces is `paired(...)`.
    """
    half = rotary_dim // 2
    pairs: list[ChannelBlock] = []
    for piece in split(0, half):
        if interleaved:
            first = start + 2 * piece.start
            pairs += [ChannelBlock(first, piece.width, 2), ChannelBlock(first + 1, piece.width, 2)]
        else:
            first = start + piece.start
            pairs += [ChannelBlock(first, piece.width), ChannelBlock(first + half, piece.width)]
    return (*pairs, *split(0, start), *split(start + rotary_dim, dim))


def paired(rotary_dim: int) -> int:
    """How many pieces of `in_pairs` are turned."""
    return 2 * len(split(0, rotary_dim // 2))


def edges(kept: Storage, dim: int, stacked: bool = False) -> list[int]:
    """Channels before which a piece must end. stacked: groups of channels are told apart by rows"""
    planes = PLANES[kept.element.bits] if kept.element.packed else ()
    sizes = [dim * width // 8 for width in planes if width != 8]
    if kept.groups(dim) > 1 and not stacked:
        sizes.append(dim // kept.groups(dim))
    return [edge for size in sizes for edge in range(size, dim, size)]


def step_in_words(role: str, keys: Storage, dim: int, rows: int) -> bool:
    """Whether a step reads keys of 2 bits in words, however few a row has: 8 are of 64 channels.

    Only steps of few heads were assembled without spills, and faster: prompts have more rows, as heads that are stacked
    have; groups of many tokens have scales that multiply the queries, and wait for these.

    rows: of a product, that the heads of a group take
    """
    own = keys.of_slots
    narrow = own.element.bits == 2 and dim * 2 // 8 >= SMALLEST
    return narrow and own.channelwise and own.group < NARROW and role == "decode" and rows <= SMALLEST


def wider(pieces: tuple[ChannelBlock, ...], rows: int) -> tuple[ChannelBlock, ...]:
    """Pieces with more columns than a product has rows, if that takes no more than twice as many.

    Triton gives all warps of two products in a row to the rows of the second, unless it has more columns: of 16 rows
    each warp would then compute all of both.
    """
    return tuple(
        replace(piece, least=2 * piece.block) if piece.block <= rows < 2 * piece.block else piece
        for piece in pieces
    )
