"""Append and attend in plain PyTorch: the oracle of every generated kernel, and what Inductor compiles.

What is given is in `kernels/inputs.py`. Where scores say which tokens stay, it goes on in `scored.py`; what both attend
by is in `attend_one.py`.

One new token is appended first and then attends to the cache: the slot that it takes is that of the token
which no longer is seen. So do many tokens of a layout that never reuses a slot. Many tokens of a ring attend
to the old slots and to themselves, and are appended after: early queries still see what late keys overwrite.
Sites that share a cache act as one: what comes before is done by the first of them, what comes after by the last.
Either way each query sees its own key as it is stored, so a prompt gives the same in any chunks.

The newest tokens that a storage keeps in full stand in rings beside (`kernels/reference/residual.py`); vectors that a
storage keeps turned stay turned: queries turn instead, and so does the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import (
    codec,
    linear_write,
    paged,
    residual,
    residual_views,
    scored,
    visibility,
)
from kvcompile.kernels.reference.attend_many import attend_many
from kvcompile.kernels.reference.attend_one import attend_one
from kvcompile.kernels.reference.kv_sides import as_read, sides, turned_back
from kvcompile.kernels.reference.selections import SELECT, gathered
from kvcompile.kernels.reference.symbolic import evaluate
from kvcompile.kernels.shared.dialect import current
from kvcompile.kernels.shared.rope import rotated_first
from kvcompile.layouts import CacheLayout, InKeys
from kvcompile.layouts import symbols as sy

AttendMany = Callable[[AttendInputs, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def cached_attention(x: AttendInputs, attend_many: AttendMany = attend_many) -> Tensor:
    """Append k and v to the buffers (in place) and attend; returns [B, Hq, S, Dv] in q's dtype.

    A step of one token is: write -> select -> attend -> note. A pass over many tokens of slots that are never reused is
    the same without a selection; of a ring it attends first and writes after.

    Args:
        attend_many: what attends where there are many, unless scores say which tokens stay.
    """
    layout, dtype = x.spec.layout, x.q.dtype
    if layout.retention.by_score:
        return scored.cached_attention(x)
    q, k, rope = rotated_first(x.q, x.k, x.positions, x.rope, x.spec)
    x = replace(x, q=q, k=k, rope=rope)
    one = q.shape[2] == 1
    chosen = SELECT[layout.selection.kind](x) if layout.selection.selects else None
    read = as_read(layout, bool(rope), q.shape[-1])
    if not rope:
        # A decode step is computed in fp32, many queries in the dtype of their keys.
        x = replace(x, q=codec.turned(layout.keys, q) if one else codec.turned(layout.keys, q).to(dtype))
    if one or layout.in_order:
        if x.spec.share in ("none", "first"):
            append(k, x.v, x.parts, x.positions, x.seq_lens, layout, x.page_table)
        keys, values, key_positions = _stored(x.parts, x.new_lens, x.span, layout, x.page_table, chosen)
        if one:
            return turned_back(_attend_one(x, read, keys, values, key_positions), layout, read).to(dtype)
        allowed = None
        if layout.residual:
            new = _new(layout, read, k, x.v)
            k_all, v_all, key_positions, allowed = residual_views.seen_by_many(
                read, keys, values, new, key_positions, x.positions, x.seq_lens, dtype
            )
        else:
            k_all = residual.decode_old(read.keys, keys, key_positions, dtype)
            v_all = _values(read, values, k_all, key_positions)
        out = attend_many(x, k_all, v_all, key_positions, allowed)
        if x.spec.share in ("none", "last"):
            _append_recent(k, x.v, x.parts, x.positions, x.seq_lens, layout)
        return turned_back(out, layout, read).to(dtype)
    keys, values, key_positions = _stored(x.parts, x.seq_lens, x.span, layout, x.page_table)
    k_all, v_all, key_positions, allowed = residual_views.seen_in_a_ring(
        layout, read, keys, values, (k, x.v), key_positions, x.positions, dtype
    )
    out = attend_many(x, k_all, v_all, key_positions, allowed)
    if x.spec.share in ("none", "last"):
        append(k, x.v, x.parts, x.positions, x.seq_lens, layout, x.page_table)
    return turned_back(out, layout, read).to(dtype)


def _attend_one(
    x: AttendInputs, read: CacheLayout, keys: list[Tensor], values: list[Tensor], tokens: Tensor
) -> Tensor:
    """One query per sequence against the cache: fp32 [B, Hq, 1, Dv]."""
    retention, places = x.spec.layout.retention, None
    if retention.in_cache:
        assert retention.window is not None
        evicted = (x.new_lens - (retention.sinks + retention.window)).clamp(min=0)[:, None]
        # Only one query: every key can be turned to its place in the cache.
        places = (x.positions - evicted, torch.where(tokens < retention.sinks, tokens, tokens - evicted))
    seen = visibility.visible(
        x.positions[:, :, None], tokens if tokens.dim() == 3 else tokens[:, None], x.spec
    )
    return attend_one(x, read, keys, values, tokens, seen, places)[0]


def append(
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    layout: CacheLayout,
    page_table: Tensor | None = None,
) -> None:
    """Encode k, v and write each token to its slot. In a ring, only the tokens that stay are written.

    The newest tokens that are kept in full are not written here where many come to a layout that never reuses a slot;
    see `_append_recent`.
    """
    one = k.shape[2] == 1
    for storage, x, own in sides(layout, k, v, buffers):
        residual.append(storage, x, own, positions, seq_lens, only_sinks=layout.in_order and not one)
    if one or layout.in_order:
        address = evaluate(layout.address, {sy.pos: positions})
        batch = torch.arange(k.shape[0], device=k.device)[:, None, None]
        head = torch.arange(k.shape[1], device=k.device)[None, :, None]
        for storage, x, own in sides(layout, k, v, buffers):
            rows, parts = residual.settled(storage, x, own, address)
            # A ring or a calibrated scale is not among them.
            for buffer, part in zip(own, parts, strict=False):
                if page_table is not None:
                    paged.write(buffer, page_table, rows, part)
                    continue
                # `rows is positions`: the address is the position, and tokens share no row.
                if current().linear and rows is positions and linear_write.fits(buffer):
                    linear_write.write(buffer, part, positions)
                    continue
                # Padding (negative positions) lands at the far end, in slots that no token of its sequence
                # reaches: the limit of tokens counts padding, too.
                row = torch.remainder(rows, buffer.shape[2])
                buffer.index_put_((batch, head, row[:, None]), part)
        return
    # Slots are taken more than once, so each slot asks which token it shall hold (no order of writes to rely on).
    new_lens = positions[:, -1] + 1
    slots = buffers[0].shape[2] if page_table is None else layout.slots(None)
    holds = _held(new_lens, slots, layout)
    index = (holds - positions[:, :1]).clamp(0, k.shape[2] - 1)
    is_new = _valid(holds, new_lens, slots, layout) & (holds >= seq_lens[:, None])
    for storage, x, own in sides(layout, k, v, buffers):
        _, parts = residual.settled(storage, x, own, positions)
        for buffer, part in zip(own, parts, strict=False):
            if page_table is None:
                residual.overwrite(buffer, part, index, is_new)
            else:
                paged.overwrite(buffer, page_table, part, index, is_new)


def _append_recent(
    k: Tensor, v: Tensor, buffers: list[Tensor], positions: Tensor, seq_lens: Tensor, layout: CacheLayout
) -> None:
    for storage, x, own in sides(layout, k, v, buffers):
        residual.append(storage, x, own, positions, seq_lens)


def _held(length: Tensor, slots: int, layout: CacheLayout) -> Tensor:
    """Position of the token in each slot, [B, slots], for sequences of `length` [B]; see `_valid`."""
    slot = torch.arange(slots, device=length.device)[None].expand(length.shape[0], slots)
    return evaluate(layout.token_at, {sy.slot: slot, sy.length: length[:, None].expand_as(slot)})


def _valid(held: Tensor, length: Tensor, slots: int, layout: CacheLayout) -> Tensor:
    """Whether the slot has been written: its token exists, and is not one that belongs to a sink's slot."""
    slot = torch.arange(slots, device=length.device)
    return (held < length[:, None]) & (held >= slot.clamp(max=layout.retention.sinks))


def _stored(
    buffers: list[Tensor],
    length: Tensor,
    span: int,
    layout: CacheLayout,
    page_table: Tensor | None = None,
    chosen: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """K's parts, V's parts and the positions [B, T] of the tokens in them; -1 where there is none.

    chosen: the slots [B, Hkv, T] that are read, and then positions are [B, Hkv, T]; None: all slots
    """
    keys, values = buffers[: layout.num_key_parts], buffers[layout.num_key_parts :]
    if chosen is not None:
        keys = gathered(layout.keys, keys, chosen, span, page_table)
        values = gathered(layout.values, values, chosen, span, page_table)
        return keys, values, torch.where(chosen < length[:, None, None], chosen, -1)
    slots = buffers[0].shape[2]
    if page_table is not None:
        slots = span if layout.in_order else layout.slots(None)
        keys = paged.stored(layout.keys, keys, page_table, slots)
        values = paged.stored(layout.values, values, page_table, slots)
    elif layout.in_order:
        keys, values = residual.up_to(layout.keys, keys, span), residual.up_to(layout.values, values, span)
        slots = span
    held = _held(length, slots, layout)
    key_positions = torch.where(_valid(held, length, slots, layout), held, -1)
    return keys, values, key_positions


def _values(layout: CacheLayout, values: list[Tensor], keys: Tensor, key_positions: Tensor) -> Tensor:
    """Values from their parts, or from decoded keys [B, Hkv, T, D] that hold them."""
    if isinstance(layout.values, InKeys):
        return keys[..., : layout.values.channels]
    return residual.decode_old(layout.values, values, key_positions, keys.dtype)


def _new(layout: CacheLayout, read: CacheLayout, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """New vectors in the basis of `read`, in the model's dtype."""
    pairs = ((layout.keys, read.keys, k), (layout.values, read.values, v))
    k, v = (codec.turned(stored, x).to(x.dtype) if stored != own else x for stored, own, x in pairs)
    return k, v
