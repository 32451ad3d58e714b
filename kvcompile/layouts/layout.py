"""CacheLayout: storage x placement x retention x selection of one layer, with its address and bytes as sympy."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.buffer import BufferSpec
from kvcompile.layouts.pages import SPARE_PAGES, Released, offset, page_index
from kvcompile.layouts.placement import Contiguous, Paged, Placement, Ring, Slots, placement_from
from kvcompile.layouts.retention import Full, Retention, retention_from
from kvcompile.layouts.selection import AllTokens, Selection, selection_from
from kvcompile.layouts.storage import InKeys, Part, Storage, storage_from

_NONE = sympy.Integer(0)


@dataclass(frozen=True)
class CacheLayout:
    """How one layer's keys and values are kept.

    before_rope: keys are stored before their rotary embedding and rotated when they are read, at the positions that
        the retention says (`positions: in_cache` always keeps them so)
    """

    keys: Storage = Storage()
    values: Storage | InKeys = Storage()
    placement: Placement = Contiguous()
    retention: Retention = Full()
    before_rope: bool = False
    selection: Selection = AllTokens()

    def check(self) -> str | None:
        """Why this combination makes no sense, or None."""
        if (self.keys.channelwise or self.values.channelwise) and not self.in_order:
            return (
                "axis: channel needs slots in the order of tokens: they settle in whole groups, and a ring takes slots "
                "back one by one; use placement 'contiguous', or axis: token"
            )
        sinks = max(self.keys.sinks, self.values.sinks)
        if not self.retention.keeps_all and sinks > self.retention.sinks:
            return (
                f"sinks: {sinks} keeps tokens in full that retention '{self.retention}' forgets: use a retention with "
                f"as many sinks, or sinks: {self.retention.sinks}"
            )
        placement = self.placement.check(self.retention)
        return self._check_selection() or placement or self._check_groups() or self._check_released()

    def _check_released(self) -> str | None:
        """Why pages behind the window cannot be given back, or None."""
        released, newest = self.released, self.unsettled
        if released is None or newest < released.window:
            return None
        return (
            f"the newest {newest} tokens come to their pages late, and pages behind a window of {released.window} are "
            f"given back by then: leave out released, or use a window of more than {newest}"
        )

    def _check_selection(self) -> str | None:
        """Why pages cannot be selected here, or None."""
        if not self.selection.selects:
            return None
        name = f"selection: {self.selection.kind}"
        if not self.retention.keeps_all:
            return (
                f"{name} reads some of all tokens, and retention '{self.retention}' forgets most: use "
                "one of the two"
            )
        if self.rotates_on_read:
            return (
                f"{name} compares keys as attention gets them, and rope: before keeps them before "
                "their RoPE; use rope: after"
            )
        if self.keys.channelwise or self.values.channelwise:
            return (
                f"{name} reads single tokens, and axis: channel keeps tokens in groups, of which it reads "
                "all; use axis: token"
            )
        return None

    def _check_groups(self) -> str | None:
        """Why the tokens that share a row do not fill pages, or None."""
        if not isinstance(self.placement, Paged):
            return None
        size = self.placement.page_size
        every = math.lcm(*(part.every for storage in (self.keys, self.values) for part in _parts(storage)))
        if size % every == 0:
            return None
        return (
            f"groups of {every} tokens share their scales and must not lie across two pages: page_size {size} is no "
            f"multiple of {every}; use {-(-size // every) * every}"
        )

    @property
    def logical(self) -> Contiguous | Ring | Slots:
        """What decides the slot of a token, whether or not the slots are in pages."""
        return self.placement.logical(self.retention) if isinstance(self.placement, Paged) else self.placement

    @property
    def in_order(self) -> bool:
        """Whether slots stand in the order of tokens and are never reused."""
        return isinstance(self.logical, Contiguous)

    @property
    def rotates_on_read(self) -> bool:
        """Whether keys are stored before RoPE, in layers that have one."""
        return self.before_rope or self.retention.in_cache

    @property
    def residual(self) -> int:
        """Newest tokens that K or V keep beside in the model's dtype, at most; 0: none."""
        return max(self.keys.residual, self.values.residual)

    @property
    def unsettled(self) -> int:
        """How many of a sequence's newest tokens may have slots that are written when later tokens come.

        What is kept in full gets its quantized form when it leaves, or a group of tokens when it is complete.
        """
        groups = [self.keys.group, *([self.values.group] if isinstance(self.values, Storage) else [])]
        return max(self.residual, *(group for group in groups if group > 1), 0)

    @property
    def in_full(self) -> bool:
        """Whether K or V keep any tokens, the newest or the first, beside in the model's dtype."""
        return any(storage.residual or storage.sinks for storage in (self.keys, self.values))

    @property
    def in_keys(self) -> bool:
        """Whether values are kept in the keys (MLA's latent)."""
        return isinstance(self.values, InKeys)

    @property
    def bounded(self) -> bool:
        """Whether the slots do not grow with the tokens (a sequence may run for ever)."""
        return sy.T not in self.num_slots.free_symbols

    @property
    def chunk_invariant(self) -> bool:
        """Whether a text leaves the same cache, and gives the same logits, in whatever pieces it comes."""
        return not self.retention.by_score and not self.selection.selects

    @property
    def num_slots(self) -> sympy.Expr:
        """Slots per sequence and KV head, in T (the limit of tokens)."""
        return self.placement.num_slots(self.retention)

    @property
    def address(self) -> sympy.Expr:
        """The slot of the token at `pos`."""
        return self.placement.address(self.retention)

    @property
    def physical_address(self) -> sympy.Expr:
        """The row of the pool, or of the sequence's own array, that the token at `pos` is in: page * size + offset."""
        if not isinstance(self.placement, Paged):
            return self.address
        size = self.placement.page_size
        row = sy.table(page_index(size)) * size + offset(size)
        return row.subs(sy.slot, self.address)

    @property
    def token_at(self) -> sympy.Expr:
        """The position of the token that `slot` holds when `length` tokens have been seen."""
        return self.placement.token_at(self.retention)

    @property
    def bytes_per_slot(self) -> sympy.Expr:
        """Bytes that one more token takes over all KV heads, in H, D, Dv, P; on average, where tokens share some."""
        summaries = sy.H * self.selection.bytes_per_slot()
        return self._vectors_per_slot + self.retention.bytes_per_slot() + summaries

    @property
    def _vectors_per_slot(self) -> sympy.Expr:
        return sy.H * (self.keys.bytes_per_vector(sy.D) + self.values.bytes_per_vector(sy.Dv))

    @property
    def bytes(self) -> sympy.Expr:
        """Bytes of the layer's cache, in B, T, H, D, Dv, P; page tables are the plan's, as layers share them.

        Paged: what B sequences of T tokens take at most, or the pool where its pages are given.
        """
        slots = self.num_slots
        state = sy.B * self.retention.bytes_per_slot() * slots
        state += sy.B * sy.H * self.selection.bytes(sy.T)
        if isinstance(self.placement, Paged):
            pages = self.placement.pages
            if pages is None:
                # A sequence that is shorter than its budget has the pages of its tokens.
                pages = sy.B * sympy.ceiling(sympy.Min(sy.T, slots) / sympy.Integer(self.placement.page_size))
            # What a storage keeps beside, in rows of a fixed number, is each sequence's own.
            beside = sy.B * sy.H * (self.keys.bytes(sy.D, _NONE) + self.values.bytes(sy.Dv, _NONE))
            return (pages + SPARE_PAGES) * self.placement.page_size * self._vectors_per_slot + beside + state
        return sy.B * sy.H * (self.keys.bytes(sy.D, slots) + self.values.bytes(sy.Dv, slots)) + state

    @property
    def state_heads(self) -> sympy.Expr:
        """How many heads note token and score of each slot: none, one for all, or each KV head, H."""
        return self.retention.state_heads

    @property
    def num_notes(self) -> int:
        """How many buffers, the last ones, note something of slots or pages, and hold no vectors."""
        return self.selection.num_notes + self.retention.num_notes

    @property
    def followed(self) -> str | None:
        """The buffer that says which tokens stayed, or were read, where a near tie may fall either way."""
        return self.retention.followed or self.selection.followed

    @property
    def num_key_parts(self) -> int:
        """How many of the buffers are K's (the rest are V's); no storage has fewer parts for other dims."""
        return len(_parts(self.keys))

    def slots(self, max_tokens: int | None) -> int:
        """`num_slots` as a number; `max_tokens` may be None for a bounded layout."""
        slots = self.num_slots if max_tokens is None else self.num_slots.subs(sy.T, max_tokens)
        return int(slots)

    def buffers(
        self, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, max_tokens: int | None
    ) -> tuple[BufferSpec, ...]:
        """The layer's tensors for one sequence, or one page of a pool: K's parts, V's, and what a retention by scores
        notes of each slot, or a selection of its own pages (which are never in a pool)."""
        paged = self.placement.page_size if isinstance(self.placement, Paged) else 0
        slots = paged or self.slots(max_tokens)
        vectors = tuple(
            BufferSpec(
                f"{side}.{part.name}",
                (num_kv_heads, part.rows(slots), *part.shape),
                part.dtype,
                paged=bool(paged and not part.fixed),
                fixed=bool(part.fixed),
            )
            for side, storage, dim in (("keys", self.keys, head_dim), ("values", self.values, v_head_dim))
            for part in storage.parts(dim, dtype)
        )
        state = self.retention.notes(num_kv_heads)
        noted = self.selection.notes(num_kv_heads, head_dim, self.slots(max_tokens), dtype)
        return (*vectors, *state, *noted)

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        if not self.selection.selects:  # which says nothing that a layout without it does not
            del data["selection"]
        if not data["placement"].get("released", True):  # nor does this
            del data["placement"]["released"]
        return data

    @property
    def released(self) -> Released | None:
        """What of a sequence stays, where pages behind a window may be given back; None: all that the slots hold."""
        return self.placement.gives_back(self.retention) if isinstance(self.placement, Paged) else None

    def to_json(self) -> str:
        """A stable text of the layout, carried by graph nodes and hashed into digests."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    @lru_cache(maxsize=256)
    def from_json(text: str) -> CacheLayout:
        data = json.loads(text)
        return CacheLayout(
            _own(data["keys"]),
            storage_from(data["values"]),
            placement_from(data["placement"]),
            retention_from(data["retention"]),
            data["before_rope"],
            selection_from(data["selection"]) if "selection" in data else AllTokens(),
        )

    def __str__(self) -> str:
        same = self.keys == self.values and not self.before_rope
        keys = f"{self.keys} before RoPE" if self.before_rope else str(self.keys)
        storage = keys if same else f"K {keys}, V {self.values}"
        selection = f" · {self.selection}" if self.selection.selects else ""
        return f"{storage} · {self.placement} · {self.retention}{selection}"


def _own(data: dict[str, Any]) -> Storage:
    """K's storage: keys are in nothing else."""
    storage = storage_from(data)
    assert isinstance(storage, Storage)
    return storage


def _parts(storage: Storage | InKeys) -> tuple[Part, ...]:
    """The storage's parts for any dim: their number, and how many tokens share a row, do not depend on it."""
    return storage.parts(128, torch.float32)
