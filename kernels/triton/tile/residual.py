"""Tokens that stand in full beside their slots: the newest ones and the first (`layouts/storage/storage.py`).

A tile in which any token is read in full has both forms, and a mask says which of them a query takes: scores are taken
from one or the other, probabilities weigh one or the other. Steps read what is in full in branches, where any token of
a tile is (`InFull.where_any`). Old tokens in full stand in `keys_full` [B, Hkv, rows, D]
(first the sinks, then a ring), those of the pass itself in `k` [B, Hkv, tokens, D], in the basis of the storage.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.kernels.triton.params import Param, TensorParam
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import dot_dtype
from kvcompile.kernels.triton.tile.block_bounds import in_full
from kvcompile.kernels.triton.tile.channel_blocks import ChannelBlock


@dataclass(frozen=True)
class InFull:
    """One side's rows in full.

    many:  whether queries have different lengths, and new tokens are not in the ring yet
    apart: whether they are read in branches of their own (`Attend.apart`)
    """

    spec: KernelSpec
    side: str
    dim: int
    pieces: tuple[ChannelBlock, ...]
    many: bool
    apart: bool = False

    @property
    def letter(self) -> str:
        return self.side[0]

    @property
    def flag(self) -> str:
        """The block that says which keys are read in full: [BLOCK_N], or [BLOCK_M, BLOCK_N] where `many`."""
        return f"{self.letter}_in_full"

    @property
    def flag_of_scores(self) -> str:
        """`flag`, as it broadcasts against [BLOCK_M, BLOCK_N]."""
        return self.flag if self.many else f"{self.flag}[None, :]"

    @property
    def params(self) -> tuple[Param, ...]:
        dtype = self.spec.torch_dtype
        own: tuple[Param, ...] = (TensorParam(f"{self.side}_full", dtype),)
        return (*own, TensorParam(self.letter, dtype, 4)) if self.many else own

    def flags(self) -> list[str]:
        """The line that defines `flag`; needs key, inside, and position or length."""
        key, inside = ("key[None, :]", "inside[None, :]") if self.many else ("key", "inside")
        length = "(tl.maximum(position, -1)[:, None] + 1)" if self.many else "length"
        return [f"{self.flag} = ({self._condition(key, length)}) & {inside}"]

    def row_flags(self) -> list[str]:
        """The line that defines `rows_flag`, the keys [BLOCK_N] that any query from `near` on reads in full."""
        if not self.many:
            return []
        return [f"{self.rows_flag} = ({self._condition('key', 'tl.maximum(near + 1, 0)')}) & inside"]

    @property
    def rows_flag(self) -> str:
        return f"{self.letter}_rows_full" if self.many else self.flag

    def _condition(self, key: str, length: str) -> str:
        sinks, settled = in_full(self.spec, self.side)
        parts = [] if settled is None else [f"({key} >= {settled.replace('{}', length)})"]
        return " | ".join([*parts, *([f"({key} < {sinks})"] if sinks else [])])

    def settled_flag(self) -> str:
        """Which keys [BLOCK_N] any query reads in their settled form; the others' may not be written yet."""
        sinks, settled = in_full(self.spec, self.side)
        if not self.many:
            return f"(inside & ~{self.flag})"
        parts = ["inside"]
        if settled is not None:
            parts.append(f"(key < {settled.replace('{}', 'tl.maximum(far + 1, 0)')})")
        if sinks:
            parts.append(f"(key >= {sinks})")
        return f"({' & '.join(parts)})"

    def where_any(self, lines: list[str]) -> list[str]:
        """`lines`, done where any key of the tile is read in full.

        A branch, so that what both forms need does not stand in registers at once: few tiles have both.
        """
        return [
            f"if tl.max({self.rows_flag}.to(tl.int32), 0) > 0:",
            *(f"    {line}" for line in lines),
        ]

    def load(self) -> list[str]:
        """Lines that define `k0_full`, ... [BLOCK_N, W] in the dot type of the model, 0 where a key is not in full."""
        kept = self.spec.layout.keys if self.side == "keys" else self.spec.layout.values
        sinks, residual = kept.sinks, kept.residual
        ring = f"{sinks} + key % {residual}" if residual else "key"
        row = f"tl.where(key < {sinks}, key, {ring})" if sinks and residual else ring
        heads, rows, letter = self.spec.num_kv_heads, sinks + residual, self.letter
        # Keys that are not there have any position.
        lines = [f"{letter}_row = (batch * {heads} + head) * {rows} + tl.where({self.rows_flag}, {row}, 0)"]
        base = f"{self.side}_full_ptr + {letter}_row[:, None] * {self.dim}"
        if self.many:
            # New ones come beside; one load of either takes half the registers of two.
            own = f"{letter}_ptr + batch * {letter}_s0 + tl.cast(head, tl.int64) * {letter}_s1"
            own = f"{own} + (key - first)[:, None].to(tl.int64) * {letter}_s2"
            lines.append(f"{letter}_at = tl.where((key < first)[:, None], {base}, {own})")
            base = f"{letter}_at"
        kind = f"tl.{dot_dtype.of_model(self.spec)}"
        for index, piece in enumerate(self.pieces):
            if self._paired(index - 1):
                continue  # with the channels before
            pair = self._paired(index)
            name = f"{letter}{index}_{'pairs' if pair else 'full'}"
            width, real = self._width(index), ""
            c = f"({piece.start} + tl.arange(0, {2 * width})[None, :])" if pair else self.channels(index)
            if width != piece.width:
                real = f" & ({c} < {piece.stop + pair})"
            guard = f"mask={self.rows_flag}[:, None]{real}, other=0.0"
            lines.append(f"{name} = tl.load({base} + {c}, {guard}).to({kind})")
            lines += self._halves(index) if pair else []
        return lines

    def channels(self, index: int) -> str:
        """An expression: the channels of a piece, [1, W]."""
        piece = self.pieces[index]
        whole = self.apart and self.side == "keys"
        return (
            f"({piece.start} + tl.arange(0, {piece.block})[None, :])" if whole else f"{self.letter}c{index}"
        )

    def _paired(self, index: int) -> bool:
        """Whether pieces `index` and the next are the even and the odd channels of one range: both are one load.

        Apart, loads would be of single numbers, and their addresses take as many registers as a tile.
        """
        if not self.apart or not 0 <= index < len(self.pieces) - 1:
            return False
        even, odd = self.pieces[index : index + 2]
        alike = even.step == odd.step == 2 and even.width == odd.width and even.block == odd.block
        return alike and odd.start == even.start + 1

    def _width(self, index: int) -> int:
        """Columns that are loaded of a piece: of a pair without its padding, if they are a power of two."""
        piece = self.pieces[index]
        return piece.width if self._paired(index) and piece.width & (piece.width - 1) == 0 else piece.block

    def _halves(self, index: int) -> list[str]:
        """Lines that take a pair apart.

        Columns of padding have the numbers of others: nobody reads what comes of them.
        """
        rows, width, block = self.spec.block_n, self._width(index), self.pieces[index].block
        letter = self.letter
        both = [f"{letter}{index}_full", f"{letter}{index + 1}_full"]
        lines = [f"{both[0]}, {both[1]} = tl.split(tl.reshape({letter}{index}_pairs, [{rows}, {width}, 2]))"]
        for name in both if width < block else []:
            repeated = f"tl.broadcast_to({name}[:, None, :], [{rows}, {block // width}, {width}])"
            lines.append(f"{name} = tl.reshape({repeated}, [{rows}, {block}])")
        return lines
