"""Append and attend where scores say which tokens stay (`layouts/retention/scored.py`): slots in any order.

Shapes as in `kernels/inputs.py`; besides K's and V's parts a layer has, per slot, the position of its token [B, Hs, N]
(int32) and its score [B, Hs, N] (fp32), Hs = Hkv, or 1 where a layer has one score for all heads. Slots fill in order:
of a sequence of `length` tokens the first min(length, N) hold one, and what stands in the others means nothing.

One new token takes its slot, attends to all slots, and leaves its probabilities there. Many attend to the slots and to
themselves; then those that stay are written, in the order of their score.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import codec, paged, residual, residual_views, score_sums
from kvcompile.kernels.reference.attend_one import attend_one
from kvcompile.kernels.reference.kv_sides import as_read, sides, turned_back
from kvcompile.kernels.reference.symbolic import evaluate
from kvcompile.kernels.shared.dialect import current
from kvcompile.kernels.shared.retention import LATEST, chosen, held_in, ranks, scores_after
from kvcompile.kernels.shared.rope import rotate, rotated_first
from kvcompile.layouts import CacheLayout, Scored
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storage import is_fp8


def cached_attention(x: AttendInputs) -> Tensor:
    """Append k, v to the buffers (in place) and attend; returns [B, Hq, S, Dv] in q's dtype.

    The buffers are K's parts, V's, then token and score of each slot.
    """
    layout, dtype = x.spec.layout, x.q.dtype
    q, k, rope = rotated_first(x.q, x.k, x.positions, x.rope, x.spec)
    one = q.shape[2] == 1
    read = as_read(layout, bool(rope), q.shape[-1])
    if not rope:
        q = codec.turned(layout.keys, q) if one else codec.turned(layout.keys, q).to(dtype)
    x = replace(x, q=q, k=k, rope=rope)
    out = _one(x, read) if one else _many(x, read)
    return turned_back(out, layout, read).to(dtype)


def _one(x: AttendInputs, read: CacheLayout) -> Tensor:
    """One query per sequence: fp32 [B, Hq, 1, Dv]."""
    layout, positions = x.spec.layout, x.positions
    retention, (token, score) = _retention(layout), x.notes
    slot = _slot_for(token, score, positions[:, None], layout)
    for storage, vectors, own in sides(layout, x.k, x.v, x.parts):
        residual.append(storage, vectors, own, positions, x.seq_lens)
        _, encoded = residual.settled(storage, vectors, own, positions)
        for buffer, part in zip(own, encoded, strict=False):  # what is kept in full is not among them
            _write(buffer, slot, part, x.page_table)
    _write(token, slot, positions[:, None].to(token.dtype))
    _write(score, slot, torch.zeros((), device=score.device))

    held = held_in(token, x.new_lens)
    keys, values = _stored(x.parts, layout, x.page_table)
    places = None
    if retention.in_cache:
        places = (positions.clamp(max=retention.tokens - 1), ranks(held))
    # A padding query sees everything, so that its softmax has something to sum to.
    seen = (held >= 0) | (positions < 0)[:, None]
    out, p = attend_one(x, read, keys, values, held, seen, places)
    # Slots without a token collect what means nothing: it is gone when a token comes.
    share = score_sums.pooled(p, retention)
    if retention.score == "last":
        score.copy_(share)
    elif retention.score != "vote":
        score.add_(share)
    return out


def _many(x: AttendInputs, read: CacheLayout) -> Tensor:
    """Many queries against the slots and themselves: [B, Hq, S, Dv]."""
    layout, spec, positions, seq_lens = x.spec.layout, x.spec, x.positions, x.seq_lens
    q, k, v, rope, parts, page_table = x.q, x.k, x.v, x.rope, x.parts, x.page_table
    retention, dtype, (token, score) = _retention(layout), x.q.dtype, x.notes
    keys, values = _stored(parts, layout, page_table)
    held = held_in(token, seq_lens)
    own = torch.where(positions < 0, -1, positions)[:, None].expand(-1, held.shape[1], -1)
    tokens = torch.cat([held, own], dim=2)
    seen = residual_views.of_slots(layout, read, keys, values, (k, v), held, positions, dtype)
    k_all, v_all = seen.keys, seen.values
    query_place, place = positions, tokens
    if retention.in_cache:
        # New tokens stand after all that were kept.
        query_place = positions - (seq_lens - retention.tokens).clamp(min=0)[:, None]
        place = torch.cat([ranks(held), query_place[:, None].expand(-1, held.shape[1], -1)], dim=2)
    # Tokens that are seen in several forms are there once for each, one behind the other.
    count = len(seen.forms)
    places = place.repeat(1, 1, count)
    if rope:
        q = rotate(q, query_place, *rope, form=spec.rotary)
        k_all = rotate(k_all, places, *rope, form=spec.rotary)
    out: Tensor
    gained: Tensor
    attend = score_sums.OP if current().in_blocks else score_sums.attend_columns
    out, gained = attend(
        q,
        k_all,
        v_all,
        tokens.repeat(1, 1, count),
        positions,
        query_place,
        places,
        replace(spec, layout=read).to_json(),
        [residual_views.PAIRS.index(form) for form in seen.forms],
        sinks=x.sinks,
        bias=x.bias,
        leaves=x.leaves,
    )
    gained = gained.unflatten(2, (count, -1)).sum(2)
    last = positions[:, -1:, None]
    scores = scores_after(score, gained, tokens, last, retention)
    stay = chosen(tokens, scores, last, token.shape[2], retention)
    slots = torch.arange(token.shape[2], device=token.device)[None]
    for (storage, vectors, mine), old in zip(sides(layout, k, v, parts), (keys, values), strict=False):
        _, encoded = residual.settled(storage, vectors, mine, positions)
        residual.append(storage, vectors, mine, positions, seq_lens)
        for buffer, before, part in zip(mine, old, encoded, strict=False):
            if page_table is None:
                buffer.copy_(_take(before, part, stay))
            else:
                paged.write(buffer, page_table, slots, _take(before, part, stay))
    token.copy_(tokens.gather(2, stay))
    score.copy_(scores.gather(2, stay))
    return out


def _stored(
    parts: list[Tensor], layout: CacheLayout, page_table: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """K's and V's parts, [B, Hkv, N, ...] each."""
    keys, values = parts[: layout.num_key_parts], parts[layout.num_key_parts :]
    if page_table is None:
        return keys, values
    slots = layout.slots(None)
    return (
        paged.stored(layout.keys, keys, page_table, slots),
        paged.stored(layout.values, values, page_table, slots),
    )


def _write(buffer: Tensor, slot: Tensor, values: Tensor, page_table: Tensor | None = None) -> None:
    """Slot [B, Hs, 1] of each head of `buffer` [B, Hkv, N, ...], or of its sequence's pages, becomes `values`."""
    head = torch.arange(buffer.shape[1], device=buffer.device)[None, :, None]
    if page_table is None:
        batch = torch.arange(buffer.shape[0], device=buffer.device)[:, None, None]
        buffer.index_put_((batch, head, slot), values)
        return
    page, row = (x[..., None] for x in paged.located(page_table, slot.squeeze(2), buffer.shape[2]))
    buffer.index_put_((page, head, row), values)


def _retention(layout: CacheLayout) -> Scored:
    assert isinstance(layout.retention, Scored)
    return layout.retention


def _slot_for(token: Tensor, score: Tensor, position: Tensor, layout: CacheLayout) -> Tensor:
    """The slot [B, Hs, 1] of the token at `position` [B, 1, 1]: the next free one, or that of the lowest score."""
    retention, held = _retention(layout), token.long()
    candidate = (held >= retention.sinks) & (held <= position - retention.recent)
    value = score / (position - held).clamp(min=1) if retention.score == "mean_age" else score
    value = value.masked_fill(~candidate, float("inf"))
    lowest = value.amin(-1, keepdim=True)
    oldest = held.masked_fill(~candidate | (value > lowest), LATEST).argmin(-1, keepdim=True)
    # Padding has a negative position, and so a slot at the far end.
    address = evaluate(layout.address, {sy.pos: position, sy.given_up: oldest})
    return torch.remainder(address, token.shape[2])


def _take(old: Tensor, new: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, Hs, N] of old [B, Hkv, N, ...] followed by new [B, Hkv, S, ...]."""
    if is_fp8(old.dtype):  # torch joins no fp8
        return _take(old.view(torch.uint8), new.view(torch.uint8), index).view(old.dtype)
    return residual.take(torch.cat([old, new], dim=2), index)
