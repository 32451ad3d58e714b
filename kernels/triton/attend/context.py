"""What an attention kernel is made of: who takes part in it, from which arrays, by which arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompile.kernels.triton import packed
from kvcompile.kernels.triton.attend import cascade, work_list
from kvcompile.kernels.triton.attend.combine import weighed
from kvcompile.kernels.triton.params import Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.retention.score import SCORED, logits_dtype
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import cache_positions, latent, scores
from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.kernels.triton.tile.channel_blocks import between, in_pairs
from kvcompile.kernels.triton.tile.reader import reader
from kvcompile.kernels.triton.tile.residual import InFull
from kvcompile.kernels.triton.tile.tile_loader import TileLoader
from kvcompile.kernels.triton.tile.values import Values
from kvcompile.layouts import Paged, Scored, TopPages
from kvcompile.specs import RotaryForm

# Sums of a program for each slot of a tile, from which on they are many: of one warp and 32 slots, a thread has 64. To
# scale them down takes as many instructions, and some ten to see whether that must be.
_SUMS = 64
_ROWS = 16  # of a product of one warp
_AT_ONCE = 64  # channels of keys in full that a product reads


@dataclass(frozen=True)
class Attend:
    """A kernel of role decode, prefill or columns."""

    spec: KernelSpec

    # ---- who

    @property
    def many(self) -> bool:
        """Whether there are many queries per sequence."""
        return self.spec.role != "decode"

    @property
    def cascade(self) -> bool:
        """Whether rows of the products may be of several sequences (`cascade.py`)."""
        return cascade.CASCADE in self.spec.options

    @property
    def packed(self) -> bool:
        """Whether the new tokens of all sequences stand in one row (`kernels/triton/packed.py`)."""
        return packed.OPTION in self.spec.options

    @property
    def row(self) -> str:
        """An expression: the row of each query of many, in what is written for each: [B, Hq, S] or, packed, [S, Hq]."""
        heads = self.spec.num_qo_heads
        if self.packed:
            return f"(query_start + token) * {heads} + heads"
        return f"(batch * {heads} + heads) * tokens + token"

    @property
    def in_order(self) -> bool:
        return self.spec.layout.in_order

    @property
    def rotary(self) -> RotaryForm | None:
        """How keys turn when they are read, or None."""
        return self.spec.site.rotary if self.spec.layout.rotates_on_read else None

    @property
    def two_queries(self) -> bool:
        """Whether queries turn at other places toward sinks."""
        return self.rotary is not None and cache_positions.two_queries(self.spec, self.many)

    @property
    def keys(self) -> TileLoader:
        spec, form = self.spec, self.rotary
        if form:
            pieces = in_pairs(spec.head_dim, form.start, form.rotary_dim, form.style == "interleaved")
            return reader(spec, "keys", pieces, elementwise=True)
        if not spec.layout.in_keys:
            return reader(spec, "keys")
        kept = spec.as_read.keys.of_slots
        # What a scale per channel is folded into would be the queries, not the probabilities; and of each group of
        # channels, a product and weights of its own would take all registers.
        grouped = kept.scale.per == "group" and kept.groups(spec.head_dim) > 1
        own = kept.channelwise or (grouped and spec.role != "columns" and not latent.by_group(spec))
        return reader(spec, "keys", elementwise=own, cuts=[weighed(spec)])

    @property
    def values(self) -> Values:
        in_keys = self.spec.layout.in_keys
        own = None if in_keys else reader(self.spec, "values")
        return Values(self.keys, own, weighed(self.spec))

    def full(self, side: str) -> InFull | None:
        """K's or V's rows in full; of values in the keys, the keys' (their own are the keys')."""
        layout = self.spec.layout
        storage = layout.keys if side == "keys" else layout.values
        if not (storage.residual or storage.sinks):
            return None
        of = self.keys if side == "keys" else self.values.of
        pieces = of.pieces
        if self.apart and side == "keys":
            # Products of their own need no pieces of codes.
            pieces = between(of.dim, range(_AT_ONCE, of.dim, _AT_ONCE))
        return InFull(self.spec, side, of.dim, pieces, self.many, self.apart)

    @property
    def apart(self) -> bool:
        """Whether what is read in full is read in branches of its own, where any key of a tile is.

        Keys that turn share cosines with those of codes, and keys that are values as well are read once. Of prompts,
        some were assembled with spills that they did not have.
        """
        return self.late and not self.many

    @property
    def late(self) -> bool:
        """Whether what is read in full is loaded where its products are, not beside the other form of its tile.

        Keys that turn do so together, keys that are values as well have two products, and `columns` reads keys once.
        """
        return (
            self.mixed
            and self.spec.role != "columns"
            and self.rotary is None
            and not self.spec.layout.in_keys
        )

    @property
    def mixed(self) -> bool:
        """Whether some keys or values are read in full from elsewhere."""
        return self.spec.layout.in_full

    @property
    def edges_wait(self) -> bool:
        """Whether tiles of prompts that have tokens in full are loaded when they are read, not ahead.

        In both forms, they would take more shared memory than the main loop; and few tiles have any.
        """
        return self.many and self.mixed

    @property
    def names(self) -> dict[str, str]:
        """What scores call things: see `scores.after`."""
        return {"heads": "heads", "real": "real", **cache_positions.names(self.spec, self.many)}

    @property
    def stack(self) -> int:
        """How often a query head is a row of the products (`tile/stacking.py`)."""
        return self.keys.stack

    @property
    def rows(self) -> int:
        """Rows of the products."""
        return self.spec.block_m * self.stack

    @property
    def many_sums(self) -> bool:
        """Whether a step's program has many sums for each slot of its tiles, as one of a single warp has."""
        sums = self.rows * sum(self.values.of.pieces[index].block for index in self.values.indices)
        return not self.many and sums >= _SUMS * self.spec.block_n

    def narrow(self, part: TileLoader) -> bool:
        """Whether numbers of groups of channels stay in float16, and minima are products (`minima.py`).

        Where a program has several warps, what they make of a tile would go through shared memory once more; as has one
        whose rows (16 heads, four times each) are more than a product of one warp has.
        """
        return part.narrow and self.many_sums and self.rows <= _ROWS

    def groups(self, side: str) -> tuple[int, int]:
        """Sets of rows that K's or V's groups of channels take, and channels of one group."""
        of = self.keys if side == "keys" else self.values.of
        count = of.scales()[0].groups
        return count, of.dim // of.storage.groups(of.dim) if count > 1 else of.dim

    @property
    def q_dtype(self) -> torch.dtype:
        return torch.float32 if "q_fp32" in self.spec.options else self.spec.torch_dtype

    @property
    def normalized(self) -> bool:
        """Whether queries are divided by their largest channel, since float16 may not hold them.

        In float16 itself, it may not hold them times what codes of their piece are owed (`TileLoader.power`).
        """
        keys = self.keys
        return keys.dot == "float16" and (self.q_dtype != torch.float16 or keys.subnormal)

    # ---- from where

    @property
    def cache(self) -> SlotArray:
        placement, layout = self.spec.as_read.placement, self.spec.layout
        size = placement.page_size if isinstance(placement, Paged) else 0
        slots = "slots" if self.in_order else str(layout.slots(None))
        if slots == "slots" and "slots16" in self.spec.options:
            slots = "slots_16"
        # Where a loop has more to compute of its tiles, Triton makes such addresses anew, or hands them over.
        by_bits = not (self.many or layout.in_keys or self.rotary or self.mixed)
        return SlotArray(
            "", slots, self.spec.num_kv_heads, self.spec.block_n, size, self.chosen, by_bits=by_bits
        )

    @property
    def chosen(self) -> int:
        """Tokens of the pages that were chosen to be read; 0: all slots are read."""
        selection = self.spec.layout.selection
        return selection.page_size if "chosen" in self.spec.options and isinstance(selection, TopPages) else 0

    @property
    def new(self) -> SlotArray:
        # Arrays of their codes are a multiple of 16 long (`host/call.py`): so rows of scales are seen to be aligned,
        # and are copied ahead. Where these are plain numbers, there are none.
        slots = "tokens" if "continued" in self.spec.options else "new_16"
        return SlotArray("new_", slots, self.spec.num_kv_heads, self.spec.block_n, packed=self.packed)

    @property
    def sources(self) -> tuple[SlotArray, ...]:
        """What decode and prefill go over, in this order."""
        if "continued" in self.spec.options:
            return (self.new,)
        return (self.cache, self.new) if "new" in self.spec.options else (self.cache,)

    @property
    def readers(self) -> tuple[TileLoader, ...]:
        own = self.values.reader
        return (self.keys,) if own is None else (self.keys, own)

    @property
    def needs_key(self) -> bool:
        """Whether more than a mask asks where a key is."""
        return scores.places_matter(self.spec) or self.rotary is not None

    @property
    def needs_place(self) -> bool:
        """Whether a key's place in the cache is asked for."""
        return self.needs_key and self.spec.layout.retention.in_cache

    @property
    def needs_token(self) -> bool:
        """Whether it is read which token a slot holds."""
        return isinstance(self.spec.layout.retention, Scored) and (self.mixed or self.needs_key)

    # ---- by which arguments

    def params(self) -> tuple[Param, ...]:
        """Those of decode or prefill, in order."""
        spec, options = self.spec, self.spec.options
        found: list[Param] = [TensorParam("q", self.q_dtype, 4)]
        for source in self.sources:
            found += source.params
            for part in self.readers:
                found += part.params(source)
        found.append(TensorParam("positions", torch.int64, 2))
        for side in ("keys", "values"):
            rows = self.full(side)
            found += rows.params if rows else ()
        found += scores.params(spec)
        if self.many:
            found += [TensorParam("sinks", torch.float32)] if spec.site.score.sinks else []
            found.append(TensorParam("out", torch.float32 if "older" in options else spec.torch_dtype))
            if {"decoded", "undecoded"} & {*options}:
                found.append(ScalarParam("decoded"))
            if "continued" in options:
                found += [TensorParam("older", torch.float32), TensorParam("older_lse", torch.float32)]
            found += [packed.STARTS, packed.ROW_TOKENS] if self.packed else [ScalarParam("tokens")]
            found += [TensorParam("lse", torch.float32)] if "lse" in options else []
        else:
            found += self._parts()
            if "logits" in options:
                found += [TensorParam("logits", logits_dtype(spec)), TensorParam("levels", torch.float32)]
        found += self.of_slots
        if self.two_queries:
            found.append(TensorParam("q_sinks", self.q_dtype, 4))
        return unique([*found, *self.tables])

    def _parts(self) -> list[Param]:
        """Where a program of decode leaves what it found."""
        options = self.spec.options
        found: list[Param] = [TensorParam("partial", torch.float32), TensorParam("sums", torch.float32)]
        if work_list.LISTED in options:
            found.append(ScalarParam("batches"))
        if self.cascade:
            found += [cascade.PREFIXES, TensorParam("spans", torch.int32)]
        if work_list.JOINED not in options:
            return [*found, *([TensorParam("spans", torch.int32)] if work_list.LISTED in options else [])]
        found += [TensorParam("arrivals", torch.int32), TensorParam("out", self.spec.torch_dtype)]
        found += [TensorParam("sinks", torch.float32)] if self.spec.site.score.sinks else []
        found += [TensorParam("lse", torch.float32)] if self.leaves_lse else []
        return [*found, *([TensorParam("score", torch.float32, 3)] if SCORED in options else [])]

    @property
    def leaves_lse(self) -> bool:
        """Whether decode, which joins, stores the log-sum-exp, for who adds shares to scores in another launch."""
        return "logits" in self.spec.options and SCORED not in self.spec.options

    @property
    def of_slots(self) -> tuple[Param, ...]:
        """What a retention by scores notes of slots, the token in each and its place; or the pages that were chosen."""
        found = []
        if self.needs_token:
            found.append(TensorParam("slots_token", torch.int32))
        if self.needs_place and isinstance(self.spec.layout.retention, Scored):
            found.append(TensorParam("slots_place", torch.int32))
        if self.chosen:
            found.append(TensorParam("pages_read", torch.int32))
        return tuple(found)

    @property
    def tables(self) -> tuple[Param, ...]:
        """cos and sin float32 [table_rows, rotary_dim], by which keys turn."""
        if not self.rotary:
            return ()
        return (
            TensorParam("cos", torch.float32),
            TensorParam("sin", torch.float32),
            ScalarParam("table_rows"),
        )


def unique(params: list[Param]) -> tuple[Param, ...]:
    """Each of `params` once: several parts of a kernel ask for one argument."""
    return tuple({param.names[0]: param for param in params}.values())
