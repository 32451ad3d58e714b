"""Append and attend where scores say which tokens stay (`layouts/scored.py`): slots in any order, a token in each.

Shapes as in `reference`; besides K's and V's parts a layer has, per slot, the position of its token [B, Hs, N] (int32)
and its score [B, Hs, N] (fp32), Hs = Hkv, or 1 where a layer has one score for all heads. Slots fill in order: of a
sequence of `length` tokens the first min(length, N) hold one, and what stands in the others means nothing.

One new token takes its slot, attends to all slots, and leaves its probabilities there. Many attend to the slots and to
themselves; then those that stay are written, in the order of their score.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.kernels import codec, columns, forms, paged, recent
from kvcompile.kernels.dialect import current
from kvcompile.kernels.retained import LATEST, chosen, held_in, ranks, scores_after
from kvcompile.kernels.rope import rotate, rotated_first
from kvcompile.kernels.score_mod import applied, modified
from kvcompile.kernels.scores import bias_by_heads, soft_capped
from kvcompile.kernels.sides import as_read, sides, turned_back, weighed
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.symbolic import evaluate
from kvcompile.layouts import CacheLayout, Scored
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storage import is_fp8


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    spec: SiteSpec,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: list[Tensor] | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    """Append k, v to `buffers` (in place) and attend; returns [B, Hq, S, Dv] in q's dtype.

    Args: as `reference.cached_attention`; buffers: K's parts, V's, then token and score of each slot.
    """
    layout, dtype = spec.layout, q.dtype
    q, k, rope = rotated_first(q, k, positions, rope, spec)
    one = q.shape[2] == 1
    reading = replace(spec, layout=as_read(layout, bool(rope), q.shape[-1]))
    if not rope:
        q = codec.turned(layout.keys, q) if one else codec.turned(layout.keys, q).to(dtype)
    attend = _one if one else _many
    out = attend(
        q, k, v, buffers, positions, seq_lens, rope, layout, reading, sinks, bias, leaves, page_table
    )
    return turned_back(out, layout, reading.layout).to(dtype)


def _one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    layout: CacheLayout,
    spec: SiteSpec,
    sinks: Tensor | None,
    bias: Tensor | None,
    leaves: list[Tensor] | None,
    page_table: Tensor | None,
) -> Tensor:
    """One query per sequence: fp32 [B, Hq, 1, Dv]."""
    retention, read = _retention(layout), spec.layout
    parts, token, score = buffers[:-2], buffers[-2], buffers[-1]
    slot = _slot_for(token, score, positions[:, None], layout)
    for storage, x, own in sides(layout, k, v, parts):
        recent.append(storage, x, own, positions, seq_lens)
        _, encoded = recent.settled(storage, x, own, positions)
        for buffer, part in zip(own, encoded, strict=False):  # what is kept in full is not among them
            _write(buffer, slot, part, page_table)
    _write(token, slot, positions[:, None].to(token.dtype))
    _write(score, slot, torch.zeros((), device=score.device))

    length = positions[:, -1] + 1
    held = held_in(token, length)
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    keys, values = _stored(parts, layout, page_table)
    query_place, place = positions, held
    if retention.in_cache:
        query_place = positions.clamp(max=retention.tokens - 1)
        place = ranks(held)
    if rope:
        q = rotate(q, query_place, *rope, form=spec.rotary)
        rotated = rotate(
            recent.decode(read.keys, keys, held, length, q.dtype), place, *rope, form=spec.rotary
        )
        scores = codec.dot_keys(codec.MODEL, q.squeeze(2).unflatten(1, heads), [rotated])
    else:
        scores = recent.dot_keys(read.keys, q.squeeze(2).unflatten(1, heads), keys, held, length)
    scores = soft_capped(scores * spec.sm_scale, spec.score.softcap)
    if spec.score.bias is not None:
        assert bias is not None
        scores = scores + bias_by_heads(spec.score.bias, bias, query_place, place, heads[1]).squeeze(3)
    # A padding query sees everything, so that its softmax has something to sum to.
    seen = (held >= 0) | (positions < 0)[:, None]
    mod = applied(spec.score.mod, query_place, place, heads, leaves)
    p = modified(mod, scores.unsqueeze(3), seen[:, :, None, None], sinks).squeeze(3)
    out = weighed(read, p, keys, values, held, length)
    # Slots without a token collect what means nothing: it is gone when a token comes.
    share = columns.pooled(p, retention)
    if retention.score == "last":
        score.copy_(share)
    elif retention.score != "vote":
        score.add_(share)
    return out.flatten(1, 2).unsqueeze(2)


def _many(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    layout: CacheLayout,
    spec: SiteSpec,
    sinks: Tensor | None,
    bias: Tensor | None,
    leaves: list[Tensor] | None,
    page_table: Tensor | None,
) -> Tensor:
    """Many queries against the slots and themselves: [B, Hq, S, Dv]."""
    retention, read, dtype = _retention(layout), spec.layout, q.dtype
    parts, token, score = buffers[:-2], buffers[-2], buffers[-1]
    keys, values = _stored(parts, layout, page_table)
    held = held_in(token, seq_lens)
    own = torch.where(positions < 0, -1, positions)[:, None].expand(-1, held.shape[1], -1)
    tokens = torch.cat([held, own], dim=2)
    seen = forms.of_slots(layout, read, keys, values, (k, v), held, positions, dtype)
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
    attend = columns.OP if current().in_blocks else columns.attend_columns
    out, gained = attend(
        q,
        k_all,
        v_all,
        tokens.repeat(1, 1, count),
        positions,
        query_place,
        places,
        spec.to_json(),
        [forms.PAIRS.index(form) for form in seen.forms],
        sinks=sinks,
        bias=bias,
        leaves=leaves,
    )
    gained = gained.unflatten(2, (count, -1)).sum(2)
    last = positions[:, -1:, None]
    scores = scores_after(score, gained, tokens, last, retention)
    stay = chosen(tokens, scores, last, token.shape[2], retention)
    slots = torch.arange(token.shape[2], device=token.device)[None]
    for (storage, x, mine), old in zip(sides(layout, k, v, parts), (keys, values), strict=False):
        _, encoded = recent.settled(storage, x, mine, positions)
        recent.append(storage, x, mine, positions, seq_lens)
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
    return recent.take(torch.cat([old, new], dim=2), index)
