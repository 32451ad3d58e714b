"""CacheLayout: storage x placement x retention of one layer, with its address and bytes as sympy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.placement import Contiguous, Placement, Ring, placement_from
from kvcompile.layouts.retention import Full, Retention, retention_from
from kvcompile.layouts.storage import ModelDtype, PerChannel, Storage, as_kept, storage_from


@dataclass(frozen=True)
class BufferSpec:
    """One cache tensor of a layer without its leading batch dim: [num_kv_heads, rows, ...], a row per slot or as
    `Part.rows` says."""

    name: str  # "keys.data", "keys.scale", "values.data", ...
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: tuple[float, ...] | None = None  # what a calibrated part holds from the start, a number per head

    def written(self, buffer: torch.Tensor) -> torch.Tensor:
        """`buffer` [batch, *shape] with what it holds from the start, in place; as it is where that is nothing."""
        if self.fill is not None:
            values = torch.tensor(self.fill, dtype=self.dtype, device=buffer.device)
            buffer.copy_(values.view(1, -1, *[1] * (buffer.dim() - 2)).expand_as(buffer))
        return buffer


@dataclass(frozen=True)
class CacheLayout:
    """How one layer's keys and values are kept.

    before_rope: keys are stored before their rotary embedding and rotated when they are read, at the positions that
        the retention says (`positions: in_cache` always keeps them so)
    """

    keys: Storage = ModelDtype()
    values: Storage = ModelDtype()
    placement: Placement = Contiguous()
    retention: Retention = Full()
    before_rope: bool = False

    def check(self) -> str | None:
        """Why this combination makes no sense, or None."""
        grouped = any(isinstance(as_kept(storage), PerChannel) for storage in (self.keys, self.values))
        if grouped and not isinstance(self.placement, Contiguous):
            return (
                "axis: channel needs slots in the order of tokens: they settle in whole groups, and a ring takes slots "
                "back one by one; use placement 'contiguous', or axis: token"
            )
        window, sinks = self.retention.window, max(self.keys.sinks, self.values.sinks)
        if window is not None and sinks > self.retention.sinks:
            return (
                f"sinks: {sinks} keeps tokens in full that retention '{self.retention}' forgets: use a retention with "
                f"as many sinks, or sinks: {self.retention.sinks}"
            )
        return self.placement.check(self.retention)

    @property
    def rotates_on_read(self) -> bool:
        """Whether keys are stored before RoPE, in layers that have one."""
        return self.before_rope or self.retention.in_cache

    @property
    def residual(self) -> int:
        """Newest tokens that K or V keep beside in the model's dtype, at most; 0: none."""
        return max(self.keys.residual, self.values.residual)

    @property
    def bounded(self) -> bool:
        """Whether the slots do not grow with the tokens (a sequence may run for ever)."""
        return isinstance(self.placement, Ring)

    @property
    def num_slots(self) -> sympy.Expr:
        """Slots per sequence and KV head, in T (the limit of tokens)."""
        return self.placement.num_slots(self.retention)

    @property
    def address(self) -> sympy.Expr:
        """The slot of the token at `pos`."""
        return self.placement.address(self.retention)

    @property
    def token_at(self) -> sympy.Expr:
        """The position of the token that `slot` holds when `length` tokens have been seen."""
        return self.placement.token_at(self.retention)

    @property
    def bytes_per_slot(self) -> sympy.Expr:
        """Bytes that one more token takes over all KV heads, in H, D, Dv, P; on average, where tokens share some."""
        return sy.H * (self.keys.bytes_per_vector(sy.D) + self.values.bytes_per_vector(sy.Dv))

    @property
    def bytes(self) -> sympy.Expr:
        """Bytes of the layer's cache, in B, T, H, D, Dv, P."""
        slots = self.num_slots
        return sy.B * sy.H * (self.keys.bytes(sy.D, slots) + self.values.bytes(sy.Dv, slots))

    @property
    def num_key_parts(self) -> int:
        """How many of the buffers are K's (the rest are V's); no storage has fewer parts for other dims."""
        return len(self.keys.parts(128, torch.float32))

    def slots(self, max_tokens: int | None) -> int:
        """`num_slots` as a number; `max_tokens` may be None for a bounded layout."""
        slots = self.num_slots if max_tokens is None else self.num_slots.subs(sy.T, max_tokens)
        return int(slots)

    def buffers(
        self, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, max_tokens: int | None
    ) -> tuple[BufferSpec, ...]:
        """The layer's tensors for one sequence: K's parts, then V's."""
        slots = self.slots(max_tokens)
        return tuple(
            BufferSpec(f"{side}.{part.name}", (num_kv_heads, part.rows(slots), *part.shape), part.dtype)
            for side, storage, dim in (("keys", self.keys, head_dim), ("values", self.values, v_head_dim))
            for part in storage.parts(dim, dtype)
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        """A stable text of the layout, carried by graph nodes and hashed into digests."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    @lru_cache(maxsize=256)
    def from_json(text: str) -> CacheLayout:
        data = json.loads(text)
        return CacheLayout(
            storage_from(data["keys"]),
            storage_from(data["values"]),
            placement_from(data["placement"]),
            retention_from(data["retention"]),
            data["before_rope"],
        )

    def __str__(self) -> str:
        same = self.keys == self.values and not self.before_rope
        keys = f"{self.keys} before RoPE" if self.before_rope else str(self.keys)
        storage = keys if same else f"K {keys}, V {self.values}"
        return f"{storage} · {self.placement} · {self.retention}"
