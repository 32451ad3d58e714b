"""Append and attend in plain PyTorch: the oracle of every generated kernel, and what Inductor compiles.

Shapes: q [B, Hq, S, D]; k [B, Hkv, S, D]; v [B, Hkv, S, Dv]; positions int64 [B, S]; seq_lens int64 [B].
S new tokens come to sequences that have seen `seq_lens` tokens. Padding stands on the left of a sequence that
has seen none: it has negative positions, its queries' results mean nothing, and no query ever sees its keys.

One new token is appended first and then attends to the cache: the slot that it takes is that of the token
which no longer is seen. So do many tokens of a layout that never reuses a slot. Many tokens of a ring attend
to the old slots and to themselves, and are appended after: early queries still see what late keys overwrite.
Sites that share a cache act as one: what comes before is done by the first of them, what comes after by the last.
Either way each query sees its own key as it is stored, so a prompt gives the same in any chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels import codec
from kvcompile.kernels.rope import rotate
from kvcompile.kernels.scores import bias_at, grouped, probabilities, soft_capped
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.symbolic import evaluate
from kvcompile.layouts import CacheLayout, Contiguous, InKeys, ModelDtype, Storage
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
    dynamic: Tensor | None = None,
) -> Tensor:
    """Append k, v to `buffers` (in place) and attend; returns [B, Hq, S, Dv] in q's dtype.

    Args:
        buffers: the layout's parts, K's then V's, each [B, Hkv, slots, ...].
        rope: [cos, sin] tables [P, R] for positions counted in the cache (q and k are then before RoPE), else [].
        span: slots of a contiguous placement to read, at least the longest sequence with the new tokens.
        sinks: a logit per query head [Hq] that takes part in the softmax and weighs no value, or None.
        bias: what `spec.score.bias` says is added to the scores, or None.
        dynamic: a mask (bool) or bias of the new queries over the slots [B or 1, Hq or 1, S, span], or None;
            for contiguous placement only.
    """
    layout = spec.layout
    new_lens = positions[:, -1] + 1
    if q.shape[2] == 1 or isinstance(layout.placement, Contiguous):
        if spec.share in ("none", "first"):
            append(k, v, buffers, positions, seq_lens, layout)
        keys, values, key_positions = _stored(buffers, new_lens, span, layout)
        if q.shape[2] == 1:
            return _decode(
                q, keys, values, key_positions, positions, new_lens, rope, spec, sinks, bias, dynamic
            )
        k_all = codec.decode(layout.keys, keys, q.dtype)
        v_all = _values(layout, values, k_all)
        return _prefill(q, k_all, v_all, key_positions, positions, seq_lens, rope, spec, sinks, bias, dynamic)
    keys, values, key_positions = _stored(buffers, seq_lens, span, layout)
    k_all = torch.cat([codec.decode(layout.keys, keys, q.dtype), _as_stored(layout.keys, k)], dim=2)
    if isinstance(layout.values, InKeys):
        v_all = _values(layout, values, k_all)
    else:
        v_all = torch.cat([_values(layout, values, k_all), _as_stored(layout.values, v)], dim=2)
    key_positions = torch.cat([key_positions, positions], dim=1)
    out = _prefill(q, k_all, v_all, key_positions, positions, seq_lens, rope, spec, sinks, bias)
    if spec.share in ("none", "last"):
        append(k, v, buffers, positions, seq_lens, layout)
    return out


def append(
    k: Tensor, v: Tensor, buffers: list[Tensor], positions: Tensor, seq_lens: Tensor, layout: CacheLayout
) -> None:
    """Encode k, v and write each token to its slot. In a ring, only the tokens that stay are written."""
    parts = [*codec.encode(layout.keys, k), *codec.encode(layout.values, v)]
    slots = buffers[0].shape[2]
    if k.shape[2] == 1 or isinstance(layout.placement, Contiguous):
        # Padding (negative positions) lands at the far end, in slots that no token of its sequence reaches:
        # the limit of tokens counts padding, too.
        slot = torch.remainder(evaluate(layout.address, {sy.pos: positions}), slots)
        batch = torch.arange(k.shape[0], device=k.device)[:, None, None]
        head = torch.arange(k.shape[1], device=k.device)[None, :, None]
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.index_put_((batch, head, slot[:, None]), part)
        return
    # Slots are taken more than once, so each slot asks which token it shall hold (no order of writes to rely on).
    new_lens = positions[:, -1] + 1
    holds = _held(new_lens, slots, layout)
    index = (holds - positions[:, :1]).clamp(0, k.shape[2] - 1)
    is_new = _valid(holds, new_lens, slots, layout) & (holds >= seq_lens[:, None])
    for buffer, part in zip(buffers, parts, strict=True):
        shape = (index.shape[0], 1, slots, *([1] * (part.dim() - 3)))
        token = torch.gather(part, 2, index.view(shape).expand(-1, part.shape[1], -1, *part.shape[3:]))
        buffer.copy_(torch.where(is_new.view(shape), token, buffer))


def _held(length: Tensor, slots: int, layout: CacheLayout) -> Tensor:
    """Position of the token in each slot, [B, slots], for sequences of `length` [B]; see `_valid`."""
    slot = torch.arange(slots, device=length.device)[None].expand(length.shape[0], slots)
    return evaluate(layout.token_at, {sy.slot: slot, sy.length: length[:, None].expand_as(slot)})


def _valid(held: Tensor, length: Tensor, slots: int, layout: CacheLayout) -> Tensor:
    """Whether the slot has been written: its token exists, and is not one that belongs to a sink's slot."""
    slot = torch.arange(slots, device=length.device)
    return (held < length[:, None]) & (held >= slot.clamp(max=layout.retention.sinks))


def _stored(
    buffers: list[Tensor], length: Tensor, span: int, layout: CacheLayout
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """K's parts, V's parts and the positions [B, T] of the tokens in them; -1 where there is none."""
    if isinstance(layout.placement, Contiguous):
        buffers = [buffer[:, :, :span] for buffer in buffers]
    slots = buffers[0].shape[2]
    held = _held(length, slots, layout)
    key_positions = torch.where(_valid(held, length, slots, layout), held, -1)
    return buffers[: layout.num_key_parts], buffers[layout.num_key_parts :], key_positions


def _values(layout: CacheLayout, values: list[Tensor], keys: Tensor) -> Tensor:
    """Values from their parts, or from decoded keys [B, Hkv, T, D] that hold them."""
    if isinstance(layout.values, InKeys):
        return keys[..., : layout.values.channels]
    return codec.decode(layout.values, values, keys.dtype)


def _as_stored(storage: Storage, x: Tensor) -> Tensor:
    return codec.decode(storage, codec.encode(storage, x), x.dtype)


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
    dynamic: Tensor | None = None,
) -> Tensor:
    """One query per sequence against the cache, in fp32."""
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
        rotated = rotate(codec.decode(layout.keys, keys, q.dtype), place, *rope, form=spec.rotary)
        scores = codec.dot_keys(ModelDtype(), q.squeeze(2).unflatten(1, heads), [rotated])
    else:
        scores = codec.dot_keys(layout.keys, q.squeeze(2).unflatten(1, heads), keys)
    seen = _visible(positions[:, :, None], key_positions[:, None], spec)
    scores = soft_capped(scores * spec.sm_scale, spec.score.softcap)
    if spec.score.bias is not None:
        assert bias is not None
        scores = scores + grouped(bias_at(spec.score.bias, bias, query_place, place).squeeze(2), heads[0])
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if dynamic is not None:
        scores = scores + grouped(_added(dynamic, positions).squeeze(2), heads[0])
    p = probabilities(scores, sinks)
    storage = layout.values
    if isinstance(storage, InKeys):
        storage, values = codec.leading(layout.keys, keys, storage.channels)
    out = codec.weigh_values(storage, p, values)
    return out.flatten(1, 2).unsqueeze(2).to(q.dtype)


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
    dynamic: Tensor | None = None,
) -> Tensor:
    """Many queries: q [B, Hq, S, D] against k [B, Hkv, T, D], v [B, Hkv, T, Dv] at key_positions [B, T]."""
    seen = _visible(positions[:, :, None], key_positions[:, None], spec)[:, None]
    if spec.layout.retention.in_cache:
        scores = _scores_in_cache(q, k, key_positions, positions, seq_lens, rope, spec, bias)
    elif spec.score.plain and dynamic is not None:
        added = _added(dynamic, positions).masked_fill(~seen, float("-inf")).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, added, scale=spec.sm_scale, enable_gqa=True)
    elif spec.score.plain:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=spec.sm_scale, enable_gqa=True)
    else:
        scores = _final(_scores(q, k), positions, key_positions, spec, bias)
    scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    if dynamic is not None:
        scores = scores + grouped(_added(dynamic, positions), scores.shape[1])
    p = probabilities(scores, sinks)
    out: Tensor = torch.matmul(p.flatten(2, 3), v.float())
    return out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype)


def _added(dynamic: Tensor, positions: Tensor) -> Tensor:
    """A mask or bias that depends on activations as what is added to the scores, fp32 [B, Hq or 1, S, T]."""
    added = torch.where(dynamic, 0.0, float("-inf")) if dynamic.dtype == torch.bool else dynamic.float()
    # A row of padding must keep something to sum to.
    return torch.where((positions < 0)[:, None, :, None], 0.0, added)


def _scores_in_cache(
    q: Tensor,
    k: Tensor,
    key_positions: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    spec: SiteSpec,
    bias: Tensor | None,
) -> Tensor:
    """Scores of many queries that count positions in the cache, fp32 [B, Hkv, G, S, T].

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
    is_sink = (key_positions >= 0) & (key_positions < retention.sinks)
    return torch.where(
        is_sink[:, None, None, None],
        _final(to_sinks, capped, key_positions, spec, bias),
        _final(scores, positions, key_positions, spec, bias),
    )


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
