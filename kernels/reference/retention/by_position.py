"""Answers for retention by positions alone: a token's slot is an expression of its position.

One new token is written first and then attends: the slot that it takes is that of the token which no longer is seen. So
do many tokens of slots that are never reused. Many tokens of a ring attend to the old slots and to themselves, and are
written after: early queries still see what late keys overwrite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import paged, residual, residual_views, slots, visibility
from kvcompile.kernels.reference.kv_sides import sides
from kvcompile.kernels.reference.retention.hooks import AttendMany, Gained, Hooks
from kvcompile.kernels.reference.slots import Stored
from kvcompile.kernels.reference.symbolic import evaluate
from kvcompile.layouts import CacheLayout, Retention
from kvcompile.layouts import symbols as sy


class ByPosition(Hooks[Retention]):
    """Slots in the order of tokens, or a ring behind the first ones; nothing is noted."""

    def slot(self, x: AttendInputs) -> Tensor:
        return evaluate(x.spec.layout.address, {sy.pos: x.positions})

    def held(self, x: AttendInputs, length: Tensor) -> Tensor:
        layout, count = x.spec.layout, slots.count(x)
        held = _held(length, count, layout)
        return torch.where(_valid(held, length, count, layout), held, -1)

    def visible(self, x: AttendInputs, tokens: Tensor) -> Tensor:
        query = x.positions[:, :, None]
        return visibility.visible(query, tokens if tokens.dim() == 3 else tokens[:, None], x.spec)

    def attend_many(
        self, x: AttendInputs, read: CacheLayout, stored: Stored, attend: AttendMany
    ) -> tuple[Tensor, None]:
        return attend(x, *residual_views.seen(x, read, stored)), None

    def keep(self, x: AttendInputs, stored: Stored, gained: Gained | None) -> None:
        """In a ring, only the tokens that stay are written.

        Slots are taken more than once, so each slot asks which token it shall hold (no order of writes to rely on).
        """
        layout, positions, table = x.spec.layout, x.positions, x.page_table
        for storage, vectors, own in sides(layout, x.k, x.v, x.parts):
            residual.append(storage, vectors, own, positions, x.seq_lens)
        length, count = x.new_lens, slots.count(x)
        holds = _held(length, count, layout)
        index = (holds - positions[:, :1]).clamp(0, x.k.shape[2] - 1)
        is_new = _valid(holds, length, count, layout) & (holds >= x.seq_lens[:, None])
        for storage, vectors, own in sides(layout, x.k, x.v, x.parts):
            _, parts = residual.settled(storage, vectors, own, positions)
            for buffer, part in zip(own, parts, strict=False):
                if table is None:
                    residual.overwrite(buffer, part, index, is_new)
                else:
                    paged.overwrite(buffer, table, part, index, is_new)


def _held(length: Tensor, count: int, layout: CacheLayout) -> Tensor:
    """Position of the token in each of `count` slots, [B, count], for sequences of `length` [B]; see `_valid`."""
    slot = torch.arange(count, device=length.device)[None].expand(length.shape[0], count)
    return evaluate(layout.token_at, {sy.slot: slot, sy.length: length[:, None].expand_as(slot)})


def _valid(held: Tensor, length: Tensor, count: int, layout: CacheLayout) -> Tensor:
    """Whether the slot has been written: its token exists, and is not one that belongs to a sink's slot."""
    slot = torch.arange(count, device=length.device)
    return (held < length[:, None]) & (held >= slot.clamp(max=layout.retention.sinks))
