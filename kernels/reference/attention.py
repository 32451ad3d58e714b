"""Appends and attends in plain PyTorch: generated kernels are held against it, and Inductor compiles it.

A step is the same for every layout:  place -> write -> select -> attend -> note.

| step | what it does | who says how |
|---|---|---|
| place | turns queries and keys to their positions, and queries to the basis of stored keys | the storage |
| write | encodes the new tokens and writes them to their slots | storage; the retention says which slots |
| select | chooses the slots that are read | the selection (`selections.py`) |
| attend | scores, softmax, and the values that they weigh | the retention says what is seen, and where it stands |
| note | keeps what the step says of tokens, and which of many stay | the retention (`retention/hooks.py`) |

What is given is in `kernels/inputs.py`. Many tokens of slots that are reused (a ring, or slots by score) attend to the
old slots and to themselves, and are written after: early queries still see what late keys overwrite. Sites that share a
cache act as one: what comes before is done by the first of them, what comes after by the last. Either way each query
sees its own key as it is stored, so a prompt gives the same in any chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import attend_many as many
from kvcompile.kernels.reference import codec, slots
from kvcompile.kernels.reference.attend_one import attend_one
from kvcompile.kernels.reference.kv_sides import as_read, turned_back
from kvcompile.kernels.reference.retention import retained
from kvcompile.kernels.reference.retention.hooks import Attends, Hooks
from kvcompile.kernels.reference.selections import SELECT
from kvcompile.kernels.reference.slots import Stored
from kvcompile.kernels.shared.rope import rotated_first
from kvcompile.layouts import CacheLayout

_REFERENCE = Attends(many.attend_many)


def cached_attention(x: AttendInputs, attend: Attends = _REFERENCE) -> Tensor:
    """Append k and v to the buffers (in place) and attend; returns [B, Hq, S, Dv] in q's dtype.

    Args:
        attend: what attends where there are many.
    """
    layout, dtype, retention = x.spec.layout, x.q.dtype, retained(x.spec.layout.retention)
    one = x.q.shape[2] == 1
    first = one or layout.in_order  # whether the new tokens are in their slots before they attend
    x, read, query = _placed(x)
    if first and x.spec.share in ("none", "first"):
        slots.write(x, retention.slot(x))
    chosen = SELECT[layout.selection.kind](x) if layout.selection.selects else None
    x = replace(x, q=query)
    stored = _stored(x, x.new_lens if first else x.seq_lens, chosen, retention)
    if one:
        places = retention.places(x, stored.tokens)
        seen = retention.visible(x, stored.tokens)
        out, p = attend_one(x, read, stored.keys, stored.values, stored.tokens, seen, places)
        retention.note(x, p)
    else:
        out, gained = retention.attend_many(x, read, stored, attend)
        if x.spec.share in ("none", "last"):
            if first:
                slots.write_residual(x)
            else:
                retention.keep(x, stored, gained)
    return turned_back(out, layout, read).to(dtype)


def _placed(x: AttendInputs) -> tuple[AttendInputs, CacheLayout, Tensor]:
    """The call with queries and keys at their positions, the layout in the basis that is read, and queries in it."""
    layout = x.spec.layout
    q, k, rope = rotated_first(x.q, x.k, x.positions, x.rope, x.spec)
    x, read = replace(x, q=q, k=k, rope=rope), as_read(layout, bool(rope), q.shape[-1])
    if rope:
        return x, read, q
    # A decode step is computed in fp32, many queries in the dtype of their keys.
    query = codec.turned(layout.keys, q)
    return x, read, query if q.shape[2] == 1 else query.to(q.dtype)


def _stored(x: AttendInputs, length: Tensor, chosen: Tensor | None, retention: Hooks[Any]) -> Stored:
    """What sequences of `length` [B] read of the slots, all of them or those that a selection has chosen."""
    reached = slots.reached(x) if chosen is None else None
    if reached is not None:
        keys, values = slots.read_at(x, reached)
        return Stored(keys, values, torch.where(reached < length[:, None], reached, -1))
    keys, values = slots.read(x, chosen)
    if chosen is None:
        return Stored(keys, values, retention.held(x, length))
    return Stored(keys, values, torch.where(chosen < length[:, None, None], chosen, -1))
