"""Tokens that stand in full beside their slots: the newest ones and the first (`layouts/storage/storage.py`).

A tile in which any token is read in full has both forms, and a mask says which of them a query takes: scores are taken
from one or the other, probabilities weigh one or the other. Old tokens in full stand in `keys_full` [B, Hkv, rows, D]
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

    many: whether queries have different lengths, and new tokens are not in the ring yet
    """

    spec: KernelSpec
    side: str
    dim: int
    pieces: tuple[ChannelBlock, ...]
    many: bool

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

    def load(self) -> list[str]:
        """Lines that define `k0_full`, ... [BLOCK_N, W] in the dot type of the model, 0 where a key is not in full."""
        kept = self.spec.layout.keys if self.side == "keys" else self.spec.layout.values
        sinks, residual = kept.sinks, kept.residual
        ring = f"{sinks} + key % {residual}" if residual else "key"
        row = f"tl.where(key < {sinks}, key, {ring})" if sinks and residual else ring
        heads, rows, letter = self.spec.num_kv_heads, sinks + residual, self.letter
        # Keys that are not there have any position.
        lines = [f"{letter}_row = (batch * {heads} + head) * {rows} + tl.where({self.rows_flag}, {row}, 0)"]
        old, new = self.rows_flag, ""
        if self.many:
            old, new = f"({self.rows_flag} & (key < first))", f"({self.rows_flag} & (key >= first))"
        kind = f"tl.{dot_dtype.of_model(self.spec)}"
        for index, piece in enumerate(self.pieces):
            c = f"{letter}c{index}"
            real = "" if piece.whole else f" & ({c} < {piece.stop})"
            name = f"{letter}{index}_full"
            at = f"{self.side}_full_ptr + {letter}_row[:, None] * {self.dim} + {c}"
            lines.append(f"{name} = tl.load({at}, mask={old}[:, None]{real}, other=0.0).to({kind})")
            if new:
                own = f"{letter}_ptr + batch * {letter}_s0 + tl.cast(head, tl.int64) * {letter}_s1"
                at = f"{own} + (key - first)[:, None].to(tl.int64) * {letter}_s2 + {c}"
                lines.append(f"{name} += tl.load({at}, mask={new}[:, None]{real}, other=0.0).to({kind})")
        return lines
