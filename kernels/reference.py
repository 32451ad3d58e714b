"""Append and attend in plain PyTorch: the oracle of every generated kernel, and what Inductor compiles.

Shapes: q [B, Hq, S, D]; k [B, Hkv, S, D]; v [B, Hkv, S, Dv]; positions int64 [B, S]; seq_lens int64 [B].
S new tokens come to sequences that have seen `seq_lens` tokens. Padding stands on the left of a sequence that
has seen none: it has negative positions, its queries' results mean nothing, and no query ever sees its keys.

One new token is appended first and then attends to the cache: the slot that it takes is that of the token
which no longer is seen. So do many tokens of a layout that never reuses a slot. Many tokens of a ring attend
to the old slots and to themselves, and are appended after: early queries still see what late keys overwrite.
Sites that share a cache act as one: what comes before is done by the first of them, what comes after by the last.
Either way each query sees its own key as it is stored, so a prompt gives the same in any chunks.

The newest tokens that a storage keeps in full stand in rings beside (`kernels/recent.py`); vectors that a storage
keeps turned stay turned: queries turn instead, and so does the result.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels import codec, forms, linear_write, page_selection, paged, recent
from kvcompile.kernels.dialect import current
from kvcompile.kernels.rope import rotate, rotated_first
from kvcompile.kernels.score_mod import applied, modified
from kvcompile.kernels.scores import bias_at, bias_by_heads, grouped, probabilities, soft_capped
from kvcompile.kernels.sides import as_read, sides, turned_back, weighed
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.symbolic import evaluate
from kvcompile.layouts import CacheLayout, InKeys, TopPages
from kvcompile.layouts import symbols as sy


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    span: int,
    spec: SiteSpec,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: list[Tensor] | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    """Append k, v to `buffers` (in place) and attend; returns [B, Hq, S, Dv] in q's dtype.

    Args:
        buffers: the layout's parts, K's then V's, each [B, Hkv, slots, ...]; pools of them where it is paged; then
            what a selection notes of its pages (`kernels/page_selection.py`).
        rope: [cos, sin] tables [P, R] where keys are stored before RoPE, or `spec.rotates_on_append` (q and k are then
            before it), else [].
        span: slots to read where slots stand in the order of tokens, at least the longest sequence with the new tokens.
        sinks: a logit per query head [Hq] that takes part in the softmax and weighs no value, or None.
        bias: what `spec.score.bias` says is added to the scores, or None.
        leaves: what `spec.score.mod` reads, as `ScoreMod.leaves` says: by position, [.., span, ..], where it is of
            tokens; None where the site has no mod.
        page_table: int32 [B, pages], where the layout is paged; see `kernels/paged.py`.
    """
    layout, dtype = spec.layout, q.dtype
    q, k, rope = rotated_first(q, k, positions, rope, spec)
    new_lens = positions[:, -1] + 1
    one = q.shape[2] == 1
    buffers, notes = buffers[: len(buffers) - layout.num_notes], buffers[len(buffers) - layout.num_notes :]
    selection, page = layout.selection, None
    if isinstance(selection, TopPages):
        smallest, largest, read_pages = notes
        page_selection.summarise(selection, k, positions, smallest, largest)
        # Of a known span all pages may be read: then it is the cache without a selection.
        if one and not (isinstance(span, int) and span <= selection.tokens):
            page = page_selection.choose(selection, q, spec.sm_scale, smallest, largest, positions, span)
        page_selection.note(read_pages, page, positions, selection)
    reading = replace(spec, layout=as_read(layout, bool(rope), q.shape[-1]))
    read = reading.layout
    if not rope:
        # A decode step is computed in fp32, many queries in the dtype of their keys.
        q = codec.turned(layout.keys, q) if one else codec.turned(layout.keys, q).to(dtype)
    if one or layout.in_order:
        if spec.share in ("none", "first"):
            append(k, v, buffers, positions, seq_lens, layout, page_table)
        keys, values, key_positions = _stored(buffers, new_lens, span, layout, page_table, page)
        if one:
            out = _decode(
                q, keys, values, key_positions, positions, new_lens, rope, reading, sinks, bias, leaves
            )
            return turned_back(out, layout, read).to(dtype)
        allowed = None
        if layout.residual:
            new = _new(layout, read, k, v)
            k_all, v_all, key_positions, allowed = forms.seen_by_many(
                read, keys, values, new, key_positions, positions, seq_lens, dtype
            )
        else:
            k_all = recent.decode_old(read.keys, keys, key_positions, dtype)
            v_all = _values(read, values, k_all, key_positions)
        out = _prefill(
            q, k_all, v_all, key_positions, positions, seq_lens, rope, reading, sinks, bias, leaves, allowed
        )
        if spec.share in ("none", "last"):
            _append_recent(k, v, buffers, positions, seq_lens, layout)
        return turned_back(out, layout, read).to(dtype)
    keys, values, key_positions = _stored(buffers, seq_lens, span, layout, page_table)
    k_all, v_all, key_positions, allowed = forms.seen_in_a_ring(
        layout, read, keys, values, (k, v), key_positions, positions, dtype
    )
    out = _prefill(
        q, k_all, v_all, key_positions, positions, seq_lens, rope, reading, sinks, bias, leaves, allowed
    )
    if spec.share in ("none", "last"):
        append(k, v, buffers, positions, seq_lens, layout, page_table)
    return turned_back(out, layout, read).to(dtype)


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
        recent.append(storage, x, own, positions, seq_lens, only_sinks=layout.in_order and not one)
    if one or layout.in_order:
        address = evaluate(layout.address, {sy.pos: positions})
        batch = torch.arange(k.shape[0], device=k.device)[:, None, None]
        head = torch.arange(k.shape[1], device=k.device)[None, :, None]
        for storage, x, own in sides(layout, k, v, buffers):
            rows, parts = recent.settled(storage, x, own, address)
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
        _, parts = recent.settled(storage, x, own, positions)
        for buffer, part in zip(own, parts, strict=False):
            if page_table is None:
                recent.overwrite(buffer, part, index, is_new)
            else:
                paged.overwrite(buffer, page_table, part, index, is_new)


def _append_recent(
    k: Tensor, v: Tensor, buffers: list[Tensor], positions: Tensor, seq_lens: Tensor, layout: CacheLayout
) -> None:
    for storage, x, own in sides(layout, k, v, buffers):
        recent.append(storage, x, own, positions, seq_lens)


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
    page: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """K's parts, V's parts and the positions [B, T] of the tokens in them; -1 where there is none.

    page: the pages [B, Hkv, n] that are read, and then positions are [B, Hkv, T]; None: all slots
    """
    keys, values = buffers[: layout.num_key_parts], buffers[layout.num_key_parts :]
    if page is not None:
        assert isinstance(layout.selection, TopPages)
        slot = page_selection.slots_of(layout.selection, page)
        keys = page_selection.gathered(layout.keys, keys, slot, span, page_table)
        values = page_selection.gathered(layout.values, values, slot, span, page_table)
        return keys, values, torch.where(slot < length[:, None, None], slot, -1)
    slots = buffers[0].shape[2]
    if page_table is not None:
        slots = span if layout.in_order else layout.slots(None)
        keys = paged.stored(layout.keys, keys, page_table, slots)
        values = paged.stored(layout.values, values, page_table, slots)
    elif layout.in_order:
        keys, values = recent.up_to(layout.keys, keys, span), recent.up_to(layout.values, values, span)
        slots = span
    held = _held(length, slots, layout)
    key_positions = torch.where(_valid(held, length, slots, layout), held, -1)
    return keys, values, key_positions


def _values(layout: CacheLayout, values: list[Tensor], keys: Tensor, key_positions: Tensor) -> Tensor:
    """Values from their parts, or from decoded keys [B, Hkv, T, D] that hold them."""
    if isinstance(layout.values, InKeys):
        return keys[..., : layout.values.channels]
    return recent.decode_old(layout.values, values, key_positions, keys.dtype)


def _new(layout: CacheLayout, read: CacheLayout, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """New vectors in the basis of `read`, in the model's dtype."""
    pairs = ((layout.keys, read.keys, k), (layout.values, read.values, v))
    k, v = (codec.turned(stored, x).to(x.dtype) if stored != own else x for stored, own, x in pairs)
    return k, v


def _visible(query: Tensor, key: Tensor, spec: SiteSpec) -> Tensor:
    """Which keys [B, 1, T] (positions, -1 for none) each query [B, S, 1] sees: bool [B, S, T]."""
    seen = (key >= 0) & (key <= query)
    if spec.mask.window is not None:
        if spec.mask.kind == "chunked":
            seen = seen & (key // spec.mask.window == query // spec.mask.window)
        else:
            seen = seen & (key > query - spec.mask.window)
    retention = spec.layout.retention
    if retention.window is not None:
        recent = key > query - retention.window
        seen = seen & (recent | (key < retention.sinks) if retention.sinks else recent)
    # A padding query sees everything, so that its softmax has something to sum to.
    return seen | (query < 0)


def _decode(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    key_positions: Tensor,
    positions: Tensor,
    new_lens: Tensor,
    rope: list[Tensor],
    spec: SiteSpec,
    sinks: Tensor | None,
    bias: Tensor | None,
    leaves: list[Tensor] | None = None,
) -> Tensor:
    """One query per sequence against the cache: fp32 [B, Hq, 1, Dv]."""
    layout, retention = spec.layout, spec.layout.retention
    heads = (keys[0].shape[1], q.shape[1] // keys[0].shape[1])
    query_place, place = positions, key_positions
    if retention.in_cache:
        assert retention.window is not None
        evicted = (new_lens - (retention.sinks + retention.window)).clamp(min=0)[:, None]
        query_place = positions - evicted
        # Only one query: every key can be turned to its place in the cache.
        place = torch.where(key_positions < retention.sinks, key_positions, key_positions - evicted)
    if rope:
        q = rotate(q, query_place, *rope, form=spec.rotary)
        k = recent.decode(layout.keys, keys, key_positions, new_lens, q.dtype)
        rotated = rotate(k, place, *rope, form=spec.rotary)
        scores = codec.dot_keys(codec.MODEL, q.squeeze(2).unflatten(1, heads), [rotated])
    else:
        of_heads = q.squeeze(2).unflatten(1, heads)
        scores = recent.dot_keys(layout.keys, of_heads, keys, key_positions, new_lens)
    by_heads = key_positions.dim() == 3
    seen = _visible(positions[:, :, None], key_positions if by_heads else key_positions[:, None], spec)
    scores = soft_capped(scores * spec.sm_scale, spec.score.softcap)
    if spec.score.bias is not None:
        assert bias is not None
        if by_heads:
            scores = scores + bias_by_heads(spec.score.bias, bias, query_place, place, heads[1]).squeeze(3)
        else:
            scores = scores + grouped(bias_at(spec.score.bias, bias, query_place, place).squeeze(2), heads[0])
    mod = applied(spec.score.mod, query_place, place, heads, leaves)
    if mod is None:
        p = probabilities(scores.masked_fill(~seen[:, :, None], float("-inf")), sinks)
    else:
        p = modified(mod, scores.unsqueeze(3), seen[:, :, None, None], sinks).squeeze(3)
    out = weighed(layout, p, keys, values, key_positions, new_lens, layout.in_order and not by_heads)
    return out.flatten(1, 2).unsqueeze(2)


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_positions: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    spec: SiteSpec,
    sinks: Tensor | None,
    bias: Tensor | None,
    leaves: list[Tensor] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Many queries: q [B, Hq, S, D] against k [B, Hkv, T, D], v [B, Hkv, T, Dv] at key_positions [B, T].

    allowed: which of the keys each query may see, besides what positions say, bool [B, S, T]; None: all.
    """
    seen = _visible(positions[:, :, None], key_positions[:, None], spec)
    if allowed is not None:
        seen = seen & (allowed | (positions < 0)[:, :, None])
    seen = seen[:, None]
    if rope and not spec.layout.retention.in_cache:
        q, k = (
            rotate(q, positions, *rope, form=spec.rotary),
            rotate(k, key_positions, *rope, form=spec.rotary),
        )
    grouped_heads = q.shape[1] != k.shape[1]
    if spec.layout.retention.in_cache:
        return _prefill_in_cache(
            q, k, v, key_positions, positions, seq_lens, rope, spec, sinks, bias, leaves, seen
        )
    mod = applied(spec.score.mod, positions, key_positions, (k.shape[1], q.shape[1] // k.shape[1]), leaves)
    if mod is not None and replace(spec.score, mod=None).plain and mod.masks_only:
        hidden = mod.seen()
        seen = seen if hidden is None else (seen[:, :, None] & hidden).flatten(1, 2)
        return F.scaled_dot_product_attention(q, k, v, seen, scale=spec.sm_scale, enable_gqa=grouped_heads)
    if spec.score.plain:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=spec.sm_scale, enable_gqa=grouped_heads)
    scores = _final(_scores(q, k), positions, key_positions, spec, bias)
    p = modified(mod, scores, seen[:, :, None], sinks)
    out: Tensor = torch.matmul(p.flatten(2, 3), v.float())
    return out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype)


def _prefill_in_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_positions: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    spec: SiteSpec,
    sinks: Tensor | None,
    bias: Tensor | None,
    leaves: list[Tensor] | None,
    seen: Tensor,
) -> Tensor:
    """Many queries that count positions in the cache; seen: bool [B, 1, S, T].

    Counted in the cache, a sink stands nearer to late queries than its own position says: sinks and the rest
    have their distances from different places. Only distances matter to RoPE and to a relative bias, so the
    rest may be counted from any base; the oldest live token keeps the table short.
    """
    retention = spec.layout.retention
    assert retention.window is not None
    budget = retention.sinks + retention.window
    base = (seq_lens - budget).clamp(min=0)[:, None]
    capped = positions.clamp(max=budget - 1)
    if rope:

        def turn(x: Tensor, places: Tensor) -> Tensor:
            return rotate(x, places, *rope, form=spec.rotary)

        scores = _scores(turn(q, positions - base), turn(k, key_positions - base))
        to_sinks = _scores(turn(q, capped), turn(k, key_positions))
    else:
        scores = to_sinks = _scores(q, k)
    is_sink = ((key_positions >= 0) & (key_positions < retention.sinks))[:, None, None, None]
    near = _final(to_sinks, capped, key_positions, spec, bias)
    scores = torch.where(is_sink, near, _final(scores, positions, key_positions, spec, bias))
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    mod = applied(spec.score.mod, positions, key_positions, heads, leaves)
    to_near = applied(spec.score.mod, capped, key_positions, heads, leaves)
    if mod is None or to_near is None:
        p = modified(None, scores, seen[:, :, None], sinks)
    else:
        # By distance, which for sinks is another one.
        scores = torch.where(is_sink, to_near.scores(scores), mod.scores(scores))
        shown, shown_near = mod.seen(), to_near.seen()
        seen = seen[:, :, None]
        if shown is not None and shown_near is not None:
            seen = seen & torch.where(is_sink, shown_near, shown)
        p = mod.weights(probabilities(scores.masked_fill(~seen, float("-inf")), sinks))
    out: Tensor = torch.matmul(p.flatten(2, 3), v.float())
    return out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype)


def _final(scores: Tensor, query: Tensor, key: Tensor, spec: SiteSpec, bias: Tensor | None) -> Tensor:
    """Raw scores [B, Hkv, G, S, T] scaled, capped and with their bias, for queries and keys at those places."""
    scores = soft_capped(scores * spec.sm_scale, spec.score.softcap)
    if spec.score.bias is None:
        return scores
    assert bias is not None
    return scores + grouped(bias_at(spec.score.bias, bias, query, key), scores.shape[1])


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[B, Hq, S, D] x [B, Hkv, T, D] -> fp32 [B, Hkv, G, S, T]."""
    group = q.shape[1] // k.shape[1]
    # The queries of a group are rows of one product: K is not repeated for each of them.
    rows = q.unflatten(1, (k.shape[1], group)).flatten(2, 3).float()
    scores: Tensor = torch.matmul(rows, k.float().transpose(-1, -2))
    return scores.reshape(*k.shape[:2], group, q.shape[2], k.shape[2])
