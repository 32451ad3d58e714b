"""Reading a tile of stored vectors: what stands in the slots, as blocks that products take, and what multiplies after.

A storage keeps x = code * scale + minimum. Scales never multiply elements where a number per token will do: those of
keys multiply a column of the scores, those of values a column of the probabilities, and minima enter through one
product more per token (kernels.md: dequantizing element by element, decode is bound by instructions). Scales that
tokens share per channel (KIVI keys) multiply the queries, once per tile of one group.

A tile is read in pieces (`channel_blocks.py`), whose elements `dequantize.py` loads; the pieces with one scale are a
`Scales`. Where vectors must be whole numbers before the product (keys that rotate when they are read), `elementwise` is
the plain form: every element dequantized. What is read how is chosen in `reader.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompile.kernels.triton.device import Fp8Form
from kvcompile.kernels.triton.params import Param, TensorParam, taken_as
from kvcompile.kernels.triton.spec import DotType
from kvcompile.kernels.triton.tile import group_numbers
from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.kernels.triton.tile.channel_blocks import SMALLEST, ChannelBlock
from kvcompile.kernels.triton.tile.code_values import scale_number
from kvcompile.layouts import Storage

# float16: bits of the mantissa, and the power of two that its least number is one over.
MANTISSA, LEAST = 10, 24


@dataclass(frozen=True)
class Scales:
    """Pieces that share a scale, a minimum: names of blocks [BLOCK_N] (or of numbers), or None.

    groups: of channels that have numbers of their own, or a power of two above: the blocks are [BLOCK_N, groups], zeros
            beyond the last group; 1: they are [BLOCK_N]
    """

    pieces: tuple[int, ...]
    scale: str | None = None
    minimum: str | None = None
    groups: int = 1


@dataclass(frozen=True)
class TileLoader:
    """K's or V's slots.

    side:     "keys" or "values"
    storage:  what is in the slots (`Storage.of_slots`)
    dim:      channels of a vector
    pieces:   how they are read
    dot:      the type of the products that they go into
    model:    the model's dtype, by name
    fp8:      how fp8 numbers are converted
    block_n:  slots of a tile
    elementwise: every element is dequantized, to `dot`
    assembly: whether integers become float16 by inline assembly; what is interpreted has a plain form
    words:    whether rows are read as words of two bytes (`channel_blocks.in_words`)
    stack:    how often a query head is a row of its products (`stacking.py`): groups of channels need no pieces then
    by_group: whether codes take the scales of their groups of channels (`affine`), if rows are read in words
    joint:    whether numbers of two halves of the channels are one load: where a loop copies tiles ahead
    lowest:   whether what the queries' sums are owed for signed codes that count from the lowest may enter scores
    whole:    whether a tile has whole groups of keys that share scales per channel, and codes take these (`affine`)
    once:     whether numbers are made of codes once, and come through shared memory to both products that read them:
              values that are in the keys. Else Triton makes them in the layout of each product, of scores by every warp
              that has the same slots, and of 576 channels they would spill
    """

    side: str
    storage: Storage
    dim: int
    pieces: tuple[ChannelBlock, ...]
    dot: DotType
    model: str
    fp8: Fp8Form
    block_n: int
    elementwise: bool
    assembly: bool
    words: bool = False
    stack: int = 1
    by_group: bool = False
    joint: bool = False
    lowest: bool = False
    whole: bool = False
    once: bool = False

    @property
    def from_lowest(self) -> bool:
        """Whether signed codes are taken for the distance to the lowest, which has no sign: `subnormal` numbers.

        Products of keys are 128 times the sum of a query too large then, and begin with that, below nought.
        """
        signed = self.lowest and self.words and self.storage.element.kind == "int"
        # Of scales per group parts of a query would have sums of their own, of scales per channel every tile.
        return signed and self.storage.scale.per not in ("group", "channel") and not self.by_element

    @property
    def letter(self) -> str:
        return self.side[0]

    @property
    def group(self) -> int:
        """Tokens that share a row of data."""
        return self.storage.group

    @property
    def fixed_scale(self) -> bool:
        """Whether one number scales all of a head's vectors."""
        return self.storage.calibration is not None

    @property
    def late_scale(self) -> bool:
        """Whether that number multiplies after the product, as it does unless elements have it already."""
        return self.fixed_scale and not self.elementwise

    @property
    def folded(self) -> bool:
        """Whether a scale per channel multiplies the other factor of the product, once per tile."""
        own = self.storage.channelwise and self.side == "keys" and not self.elementwise
        return own and self.group % self.block_n == 0 and not self.whole

    @property
    def affine(self) -> bool:
        """Whether codes become code * scale + minimum in float16, two at once.

        Of a tile of whole groups of tokens that share scales per channel: folded into the queries, these would take
        queries of their own for each group. Of many queries also where groups of channels have scales: these would take
        products of their own, as the rows of a product are full (`by_group`).
        """
        return self.words and (self.by_group or (self.storage.channelwise and not self.folded))

    @property
    def by_element(self) -> bool:
        """Whether scales multiply elements."""
        return self.elementwise or (self.storage.channelwise and not (self.folded or self.affine))

    @property
    def subnormal(self) -> bool:
        """Whether codes go into products as they stand in a word, as subnormal numbers of float16.

        What a mask leaves of a word in the ten bits of a mantissa is code * 2^-`power`, exactly, and tensor cores take
        such numbers as any other: one instruction makes two numbers. What is owed, a power of two for each piece, goes
        to its queries and the factor of scores, or to its sums of weighed values. Codes that take their scales in
        float16 (`affine`) are integers: a scale times 2^24 is no number of it. So are those whose scales multiply the
        queries (`folded`): of two factors, float16 may not hold the product.
        """
        element = self.storage.element
        whole = self.affine or self.folded or self.by_element
        plain = element.kind == "uint" and element.bits in (2, 4)
        return (plain or self.from_lowest) and self.dot == "float16" and not whole

    @property
    def narrow(self) -> bool:
        """Whether numbers of groups, which multiply rows of products (`stacking.py`), may stay in float16."""
        kept = self.storage.scale
        grouped = self.stack > 1 and self.scales()[0].groups > 1
        return grouped and kept.dtype == "float16" and self.dot == "float16"

    def bit(self, index: int) -> int:
        """Of a piece of `subnormal` numbers: from which bit of float16 on its codes stand."""
        piece, bits = self.pieces[index], self.storage.element.bits
        at = self.word(index)[1] if self.words else piece.start // self.row_bytes * bits
        return at if at + bits <= MANTISSA else at - 8

    def power(self, index: int) -> int:
        """What a piece's codes are owed: numbers in products, times 2 to this, are codes."""
        return LEAST - self.bit(index) if self.subnormal else 0

    def params(self, source: SlotArray) -> tuple[Param, ...]:
        """The parts in memory, as tensors [array, KV head, row, ...]."""
        found = []
        for part in self.storage.parts(self.dim, getattr(torch, self.model)):
            if part.fixed and source.prefix:
                continue
            dtype = taken_as(part.dtype, self.fp8)
            found.append(TensorParam(f"{source.prefix}{self.side}_{part.name}", dtype))
        return tuple(found)

    # ---- what multiplies

    def scales(self) -> tuple[Scales, ...]:
        """Which pieces are multiplied by what, after the product."""
        every = tuple(range(len(self.pieces)))
        kept, letter = self.storage, self.letter
        if self.elementwise or self.affine:
            return (Scales(every),)
        match kept.scale.per:
            case "vector":
                return (Scales(every, f"{letter}_scale"),)
            case "group" if self.stack > 1 and kept.groups(self.dim) > 1:
                minimum = f"{letter}_minimum" if kept.scale.minimum else None
                columns = group_numbers.columns(kept, self.dim)
                return (Scales(every, f"{letter}_scale", minimum, columns),)
            case "group":
                width = self.dim // kept.groups(self.dim)
                return tuple(
                    Scales(
                        tuple(i for i in every if self.pieces[i].start // width == g),
                        f"{letter}_scale{g}",
                        f"{letter}_minimum{g}" if kept.scale.minimum else None,
                    )
                    for g in range(kept.groups(self.dim))
                )
            case _:
                return (Scales(every),)

    def load_scales(self, source: SlotArray, masked: bool, narrow: bool = False) -> list[str]:
        """Lines that define what `scales` names, fp32 [BLOCK_N].

        narrow: numbers of groups as they are stored, [BLOCK_N, groups]
        """
        lines = []
        groups = self.scales()
        if groups[0].groups > 1:
            return self._by_groups(source, groups[0], masked, narrow)
        for part in ("scale", "minimum"):
            names = [name for group in groups if (name := getattr(group, part)) is not None]
            count = len(names)
            if count > 1 and (self.joint or count & (count - 1) == 0):
                lines += self._split(source, part, names, masked)
                continue
            guard = ", mask=inside, other=0.0" if masked else ""
            for index, name in enumerate(names):
                at = source.numbers(f"{self.side}_{part}", count, index)
                lines.append(f"{name} = {scale_number(self.storage.scale, f'tl.load({at}{guard})')}")
        return lines

    def _by_groups(self, source: SlotArray, own: Scales, masked: bool, narrow: bool) -> list[str]:
        """Lines that load the numbers of all groups of a token, [BLOCK_N, groups]."""
        lines = []
        for part, name in (("scale", own.scale), ("minimum", own.minimum)):
            if name is not None:
                lines += group_numbers.loaded(
                    source, f"{self.side}_{part}", name, self.storage, self.dim, masked
                )
                if not narrow:
                    lines.append(f"{name} = {scale_number(self.storage.scale, name)}")
        return lines

    def _split(self, source: SlotArray, part: str, names: list[str], masked: bool) -> list[str]:
        """Lines that load the numbers of all groups of a token at once, and take them apart, half by half."""
        count, own = group_numbers.columns(self.storage, self.dim), f"{self.letter}_{part}"
        lines = group_numbers.loaded(source, f"{self.side}_{part}", own, self.storage, self.dim, masked)
        lines.append(f"{own} = {scale_number(self.storage.scale, own)}")
        # Zeros beyond the last group are nobody's.
        names = [*names, *(f"{own}_beyond" for _ in range(len(names), count))]
        # The name of a block tells the groups in it: every `step`-th from `first` on.
        blocks, step = {0: own}, 1
        while step < count:
            halves: dict[int, str] = {}
            for first, block in blocks.items():
                pair = [names[g] if 2 * step == count else f"{block}_{g}" for g in (first, first + step)]
                left = count // step // 2
                shape = f"[{self.block_n}, {left}, 2]" if left > 1 else f"[{self.block_n}, 2]"
                lines.append(f"{pair[0]}, {pair[1]} = tl.split(tl.reshape({block}, {shape}))")
                halves |= {first: pair[0], first + step: pair[1]}
            blocks, step = halves, 2 * step
        return lines

    # ---- the elements

    def channel_scales(self, source: SlotArray) -> list[str]:
        """Lines that define `k_scale0`, `k_minimum0`, ... [1, W] of a tile whose tokens share them (`folded`)."""
        lines = []
        for index, piece in enumerate(self.pieces):
            for part in ("scale", "minimum"):
                at = source.shared(
                    f"{self.side}_{part}", self.group, self.dim, self.channels(index), alike=True
                )
                guard = f", mask={self.real(index)}, other=0.0" if not piece.whole else ""
                number = scale_number(self.storage.scale, f"tl.load({at}{guard})")
                lines.append(f"{self.letter}_{part}{index} = {number}")
        return lines

    def pair_scales(self, source: SlotArray, index: int, masked: bool) -> list[str]:
        """Lines that define `k_scale0`, `k_minimum0`, .. of piece `index` (`affine`), [BLOCK_N, W].

        Compiled, they are words of two numbers, of a channel and the next: of those, pieces of even and of odd channels
        take theirs. The words of two planes are one load, which is taken apart: each load that is copied ahead takes
        registers for where it stands.
        """
        if self.by_group:
            return self._group_scales(source, index, masked)
        piece, groups = self.pieces[index], self.block_n // self.group
        if self.assembly and piece.start % 2:
            return []  # with the channels before
        planes = self.assembly and self._two_planes
        guards = [f"(start + tl.arange(0, {groups})[:, None] * {self.group} < end)"] if masked else []
        lines: list[str] = []
        if index == 0 or not planes:
            lines += source.groups(f"{self.letter}_groups", self.group, masked)
        for part in self.storage.scale.numbers:
            name = f"{self.letter}_{part}{index}"
            pointer = f"{source.prefix}{self.side}_{part}_ptr"
            channels, width, own = self.channels(index), self.dim, []
            if self.assembly:
                pointer, width = f"{pointer}.to(tl.pointer_type(tl.uint32))", self.dim // 2
                first = f"{piece.start // 2} + " if piece.start else ""
                channels = f"({first}tl.arange(0, {2 * piece.block if planes else piece.block})[None, :])"
                own += [] if piece.whole else [f"({channels} < {piece.start // 2 + piece.width})"]
            elif not piece.whole:
                own.append(self.real(index))
            guard = f", mask={' & '.join([*guards, *own])}, other=0" if guards or own else ""
            block = f"tl.load({pointer} + {self.letter}_groups * {width} + {channels}{guard})"
            if planes and index == 0:
                lines += self._parted(part, block, groups, piece.block)
            elif not planes:
                lines.append(f"{name} = {block}")
            lines += [
                f"{name} = tl.broadcast_to({name}[:, None, :], [{groups}, {self.group}, {piece.block}])",
                f"{name} = tl.reshape({name}, [{self.block_n}, {piece.block}])",
            ]
        return lines

    def _parted(self, part: str, block: str, rows: int, columns: int, planes: int = 2) -> list[str]:
        """Lines that take apart numbers [rows, planes * columns]: those of piece 0, of piece 2, and so on."""
        name = f"{self.letter}_{part}"
        names = [f"{name}{2 * plane}" for plane in range(planes)]
        if planes == 4:
            low, high = f"{name}_low", f"{name}_high"
            return [
                *_split_in_two(name, block, rows, 2 * columns, (low, high)),
                *_split_in_two(low, low, rows, columns, (names[0], names[1])),
                *_split_in_two(high, high, rows, columns, (names[2], names[3])),
            ]
        return _split_in_two(name, block, rows, columns, (names[0], names[1]))

    @property
    def _two_planes(self) -> bool:
        """Whether the words of even and odd channels are those of two planes alike, and nothing else.

        Of fewer than 32 words, one load takes more registers than two: kernels were assembled both ways.
        """
        first = self.pieces[0]
        starts = tuple(piece.start for piece in self.pieces)
        alike = all(piece.whole and piece.block == first.block for piece in self.pieces)
        return (
            self.joint
            and alike
            and first.block >= 2 * SMALLEST
            and starts == (0, 1, 2 * first.block, 2 * first.block + 1)
        )

    def _group_scales(self, source: SlotArray, index: int, masked: bool) -> list[str]:
        """Lines that define the numbers of a piece's groups of channels in float16, for each of its channels.

        Of a step, the first piece loads those of all groups: of a half or a quarter of them, a thread would have two
        bytes, which are not copied ahead.
        """
        piece, count = self.pieces[index], self.storage.groups(self.dim)
        if piece.start % 2:
            return []  # with the channels before
        size = self.dim // count
        covered = max(1, 2 * piece.width // size)
        guard = ", mask=inside[:, None], other=0.0" if masked else ""
        lines = []
        for part in self.storage.scale.numbers:
            name = f"{self.letter}_{part}{index}"
            # Even and odd channels take theirs together. A group may be longer than the channels of both.
            planes = len(self.pieces) // 2
            parted = self.joint and planes in (2, 4) and count == planes * covered
            if parted and index == 0:
                every = source.rows(f"{self.side}_{part}", count, f"tl.arange(0, {count})[None, :]")
                lines += self._parted(part, f"tl.load({every}{guard})", self.block_n, covered, planes)
            elif not parted:
                places = f"{piece.start // size} + tl.arange(0, {covered})[None, :]"
                lines.append(f"{name} = tl.load({source.rows(f'{self.side}_{part}', count, places)}{guard})")
            # Columns of padding have the numbers of others: their codes are zeros, and nobody reads what comes of them.
            sets, each = piece.block // piece.width, piece.width // covered
            more, wide = ("[:, None, :, None]", f"{sets}, ") if sets > 1 else ("[:, :, None]", "")
            whole = f"tl.broadcast_to({name}{more}, [{self.block_n}, {wide}{covered}, {each}])"
            lines.append(f"{name} = tl.reshape({whole}, [{self.block_n}, {piece.block}])")
        return lines

    def constants(self) -> list[str]:
        """Lines before the loops: the channels of each piece, [1, W], and the words that they are in."""
        lines = []
        for index, piece in enumerate(self.pieces):
            step = "" if piece.step == 1 else f"{piece.step} * "
            start = "" if piece.start == 0 else f"{piece.start} + "
            lines.append(f"{self.channels(index)} = {start}{step}tl.arange(0, {piece.block})[None, :]")
            if self.words:
                first, _ = self.word(index)
                own = f"{first} + " if first else ""
                lines.append(f"{self.letter}w{index} = {own}tl.arange(0, {piece.block})[None, :]")
        return lines

    def channels(self, index: int) -> str:
        return f"{self.letter}c{index}"

    @property
    def row_bytes(self) -> int:
        """Of a vector's codes."""
        element = self.storage.element
        return self.dim * (element.bits if element.packed else 8) // 8

    def word(self, index: int) -> tuple[int, int]:
        """Of a piece that is read in words: the first of them, and from which bit of a word on its codes stand."""
        start, size = self.pieces[index].start, self.row_bytes
        plane = start // size * self.storage.element.bits
        return start % size // 2, plane + 8 * (start % size % 2)

    def real(self, index: int) -> str:
        """Which channels of a padded piece are channels."""
        return f"({self.channels(index)} < {self.pieces[index].stop})"

    def guard(self, index: int, masked: bool, other: str = "0.0") -> str:
        parts = ["inside[:, None]"] if masked else []
        parts += [] if self.pieces[index].whole else [self.real(index)]
        return f", mask={' & '.join(parts)}, other={other}" if parts else ""

    @property
    def integers(self) -> bool:
        kind = self.storage.element.kind
        return self.fp8 == "bits" if kind == "fp8" else kind != "float"


def _split_in_two(name: str, block: str, rows: int, columns: int, halves: tuple[str, str]) -> list[str]:
    """Lines that take apart numbers [rows, 2 * columns] in two halves."""
    return [
        f"{name} = tl.reshape({block}, [{rows}, 2, {columns}])",
        f"{halves[0]}, {halves[1]} = tl.split(tl.permute({name}, [0, 2, 1]))",
    ]
