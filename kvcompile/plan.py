"""The plan: for every attention site one Decision, made once (kvcompile/decide/); the passes only carry it out.

A Plan is pure, frozen, printable and hashable; its digest names every compiled artifact that it led to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import sympy
import torch

from kvcompile.kernels.spec import Kernels, Share, SiteSpec
from kvcompile.layouts import (
    BufferSpec,
    CacheLayout,
    Paged,
    PageGroup,
)
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.pages import TABLE_BYTES, Released
from kvcompile.specs import PLACE, PROSE, RecurrentState, RotaryForm, SiteFacts, StateSlot

INDUCTOR = "inductor"  # the backend that is always there


# What layers have in common that share a page table: layers that give back other pages must not.
_Table = tuple[Paged, sympy.Expr, Released | None]


@dataclass(frozen=True)
class Limits:
    """What one cache may hold. `max_tokens` None: no limit, every layer is bounded by itself."""

    max_batch: int
    max_tokens: int | None
    prefill_chunk: int


@dataclass(frozen=True, kw_only=True)
class Decision(SiteFacts):
    """One site and the layout chosen for it."""

    layout: CacheLayout
    lossless: bool
    because: tuple[str, ...] = field(metadata=PROSE)
    rope: RotaryForm | None = None  # the site's rotary embedding, where one was recognised
    latent: bool = (
        False  # attends over latent rows, one for all heads, which the site's sizes here are those of
    )
    rerun: bool = False  # a part of its mask is run again over the cache
    mask_rows: tuple[StateSlot, ...] = ()  # what that mask reads of every token, kept beside K and V
    scales: tuple[tuple[str, tuple[float, ...]], ...] = ()  # calibrated, per KV head: ("keys.scale", (...))
    kernels: Kernels = "reference"  # what runs it
    kernels_because: str = field(default="", metadata=PROSE)
    rope_on_append: bool = False  # the op turns new queries and keys, not the graph before it
    # Where it runs and has its cache, of a model over several devices; None: on the model's only one.
    device: str | None = field(default=None, metadata=PLACE)

    @property
    def owns(self) -> bool:
        """Whether the cache that this site reads is its own, and so counted here."""
        return self.kv_source == self.layer

    @property
    def rotary(self) -> RotaryForm | None:
        """How keys are turned when they are read; None where they are kept as they are read."""
        return self.rope if self.layout.rotates_on_read else None

    @property
    def rotary_in_op(self) -> RotaryForm | None:
        """How the op turns vectors that it is given before RoPE; None where it is given them after."""
        return self.rope if self.rope_on_append else self.rotary

    def site_spec(self, share: Share = "none") -> SiteSpec:
        """The site's constants as its op has them; share: its place among the sites that read one cache."""
        return SiteSpec(
            self.layout, self.sm_scale, self.mask, self.score, self.rotary_in_op, share, self.kernels
        )

    @property
    def evidence(self) -> str:
        """How what happens to its scores is known: a class that is proved, an expression that is carried, or more."""
        if self.rerun:
            return "run again over the cache"
        return "proved" if self.score.mod is None else "carried"

    @property
    def attention(self) -> str:
        """Mask and what happens to the scores: "sliding(128), sink logits"."""
        mask = str(self.mask)
        return mask if self.score.plain else f"{mask}, {self.score}"

    @property
    def mask_bytes(self) -> int:
        """Bytes that the mask keeps of one token."""
        return sum(row.nbytes for row in self.mask_rows)

    @property
    def bytes(self) -> sympy.Expr:
        """Bytes of what this site keeps, in B, T, H, D, Dv, P."""
        return self.layout.bytes + sy.B * self.layout.num_slots * self.mask_bytes

    def buffers(self, dtype: torch.dtype, max_tokens: int | None) -> tuple[BufferSpec, ...]:
        """The site's tensors for one sequence, [heads, slots, ...] each: K's parts, V's, and what the mask keeps."""
        own = self.layout.buffers(self.num_kv_heads, self.head_dim, self.v_head_dim, dtype, max_tokens)
        known = dict(self.scales)
        own = tuple(replace(spec, fill=known[spec.name]) if spec.name in known else spec for spec in own)
        slots = self.layout.slots(max_tokens)
        rows = (
            BufferSpec(f"mask.{i}", (1, slots, *row.shape), row.torch_dtype)
            for i, row in enumerate(self.mask_rows)
        )
        return (*own, *rows)

    @property
    def ops(self) -> tuple[str, ...]:
        """The roles that run at this site."""
        rope = "rope+" if self.rotary is not None else ""
        attend = f"{rope}attend[K {self.layout.keys}, V {self.layout.values}]"
        rope = "rope+" if self.rope_on_append else ""
        return (f"{rope}append[{self.layout.placement}]", attend) if self.owns else (attend,)

    def subs(self, expression: sympy.Expr, itemsize: int) -> sympy.Expr:
        """`expression` with this site's head counts and sizes filled in."""
        return expression.subs(
            {sy.H: self.num_kv_heads, sy.D: self.head_dim, sy.Dv: self.v_head_dim, sy.P: itemsize}
        )

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one more token, all KV heads, rounded up; none where the cache is another layer's."""
        if not self.owns:
            return 0
        return int(sympy.ceiling(self.subs(self.layout.bytes_per_slot, itemsize))) + self.mask_bytes


@dataclass(frozen=True)
class Plan:
    """All decisions, the limits and the dtype they hold for; `states` is what recurrent modules carry, as it is."""

    recipe: str = field(metadata=PROSE)
    recipe_digest: str = field(metadata=PROSE)
    dtype: str
    limits: Limits
    decisions: tuple[Decision, ...]
    states: tuple[RecurrentState, ...] = ()
    scales: str | None = None  # digest of the calibrated scales that it uses
    # What nobody has set, and why it was chosen, where `auto` chose it.
    notes: tuple[str, ...] = field(default=(), metadata=PROSE)
    step: Literal["regions", "cudagraph"] = "regions"  # how a decode step runs
    step_because: str = field(default="", metadata=PROSE)  # where the recipe's mode asks for the latter
    backend: str = INDUCTOR  # what compiles the graph
    # What an optional backend compiles, and what it leaves.
    backend_because: str = field(default="", metadata=PROSE)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def lossless(self) -> bool:
        """Whether every layer keeps all that the original model would read, unrounded."""
        return all(decision.lossless for decision in self.decisions)

    @property
    def bounded(self) -> bool:
        """Whether no layer's memory grows with the tokens."""
        return all(decision.layout.bounded for decision in self.decisions)

    @property
    def chunk_invariant(self) -> bool:
        """Whether results do not depend on the pieces in which a text comes, beyond rounding."""
        return all(decision.layout.chunk_invariant for decision in self.decisions)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes over all layers while no budget is full."""
        return sum(decision.bytes_per_token(self.torch_dtype.itemsize) for decision in self.decisions)

    def bytes(self, batch: int, max_tokens: int | None = None) -> int:
        """Bytes of the cache for `batch` sequences of at most `max_tokens` (default: the plan's limit)."""
        values = self._sizes(batch, max_tokens)
        kept = sum(self._bytes_of(decision, values) for decision in self.decisions)
        return kept + int(self.table_bytes.subs(values)) + batch * self.state_bytes

    def bytes_by_device(self, batch: int, max_tokens: int | None = None) -> dict[str, int]:
        """`bytes` on each device of a model over several, without page tables; empty where it is on one."""
        values, found = self._sizes(batch, max_tokens), dict.fromkeys(self.devices, 0)
        for decision in self.decisions:
            if decision.device is not None:
                found[decision.device] += self._bytes_of(decision, values)
        for state in self.states:
            if state.device is not None:
                found[state.device] += batch * state.nbytes
        return found

    def _sizes(self, batch: int, max_tokens: int | None) -> dict[sympy.Symbol, Any]:
        tokens = self.limits.max_tokens if max_tokens is None else max_tokens
        # Without a limit, every budget is full.
        return {sy.B: batch, sy.T: sympy.oo if tokens is None else tokens}

    def _bytes_of(self, decision: Decision, values: dict[sympy.Symbol, Any]) -> int:
        if not decision.owns:
            return 0
        return int(decision.subs(decision.bytes, self.torch_dtype.itemsize).subs(values))

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """Layers that share a page table, at the plan's limit; none without paged layers."""
        tokens = self.limits.max_tokens
        found: dict[_Table, list[Decision]] = {}
        for key, decision in self._paged():
            found.setdefault(key, []).append(decision)
        return tuple(
            PageGroup(
                f"page_table_{number}",
                tuple(decision.layer for decision in members),
                placement.page_size,
                members[0].layout.slots(tokens),
                placement.pages,
                released,
            )
            for number, ((placement, _, released), members) in enumerate(found.items())
        )

    @property
    def table_bytes(self) -> sympy.Expr:
        """Bytes of all page tables, in B and T."""
        tables = {key: decision.layout for key, decision in self._paged()}
        entries = [
            placement.pages_per_sequence(layout.retention) for (placement, _, _), layout in tables.items()
        ]
        return sympy.Add(*(sy.B * TABLE_BYTES * count for count in entries))

    def _paged(self) -> Iterator[tuple[_Table, Decision]]:
        """The paged layers that own their cache, each with what those of one table have in common."""
        for decision in self.decisions:
            placement = decision.layout.placement
            if decision.owns and isinstance(placement, Paged):
                layout = decision.layout
                yield (placement, layout.num_slots, placement.gives_back(layout.retention)), decision

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state per sequence, of any length."""
        return sum(state.nbytes for state in self.states)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of a model over several, in the order of its layers; none where it is on one."""
        places = [*(d.device for d in self.decisions), *(state.device for state in self.states)]
        return tuple(dict.fromkeys(device for device in places if device is not None))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def whole_prompts(self) -> bool:
        """Whether some layer needs a prompt in one pass."""
        retentions = [decision.layout.retention for decision in self.decisions]
        return any(retention.whole_prompts for retention in retentions)

    def digest(self) -> str:
        """A short stable hash of everything that decides what is generated, and of no prose: not of reasons, source
        lines, the recipe's name, or what in it led to the same."""
        return hashlib.sha256(json.dumps(_decisive(self), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        head = f"plan {self.digest()} of recipe {self.recipe} ({self.dtype}, {self.limits})"
        rows = (
            f"  {d.layer:>3} {d.module_path}: {d.num_qo_heads}/{d.num_kv_heads} heads x {d.head_dim}, {d.attention} "
            f"-> {d.layout}; because {'; '.join(d.because)}; {d.kernels} kernels"
            for d in self.decisions
        )
        states = (
            f"  state {s.module_path}: {s.nbytes} bytes a sequence ({', '.join(slot.name for slot in s.slots)})"
            for s in self.states
        )
        return "\n".join((head, *(f"  {note}" for note in self.notes), *rows, *states))


def _decisive(value: Any) -> Any:
    """A record as plain values, without what is prose."""
    if is_dataclass(value):
        kept = (of.name for of in fields(value) if "prose" not in of.metadata)
        return {"": type(value).__name__} | {name: _decisive(getattr(value, name)) for name in kept}
    if isinstance(value, (tuple, list)):
        return [_decisive(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _decisive(each) for key, each in value.items()}
    return value
