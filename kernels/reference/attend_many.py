"""Attention of many new queries against decoded keys and values, in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import visibility
from kvcompile.kernels.reference.score_mod import applied, modified
from kvcompile.kernels.reference.scores import bias_at, grouped, probabilities, soft_capped
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec


def attend_many(
    x: AttendInputs, k: Tensor, v: Tensor, key_positions: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """x.q [B, Hq, S, D] against k [B, Hkv, T, D], v [B, Hkv, T, Dv] at key_positions [B, T] -> [B, Hq, S, Dv].

    allowed: which of the keys each query may see, besides what positions say, bool [B, S, T]; None: all.
    """
    spec, q, positions = x.spec, x.q, x.positions
    seen = visibility.visible(positions[:, :, None], key_positions[:, None], spec)
    if allowed is not None:
        seen = seen & (allowed | (positions < 0)[:, :, None])
    seen = seen[:, None]
    if x.rope and not spec.layout.retention.in_cache:
        q, k = (
            rotate(q, positions, *x.rope, form=spec.rotary),
            rotate(k, key_positions, *x.rope, form=spec.rotary),
        )
    grouped_heads = q.shape[1] != k.shape[1]
    if spec.layout.retention.in_cache:
        return _in_cache(x, k, v, key_positions, seen)
    mod = applied(spec.score.mod, positions, key_positions, (k.shape[1], q.shape[1] // k.shape[1]), x.leaves)
    if mod is not None and replace(spec.score, mod=None).plain and mod.masks_only:
        hidden = mod.seen()
        seen = seen if hidden is None else (seen[:, :, None] & hidden).flatten(1, 2)
        return F.scaled_dot_product_attention(q, k, v, seen, scale=spec.sm_scale, enable_gqa=grouped_heads)
    if spec.score.plain:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=spec.sm_scale, enable_gqa=grouped_heads)
    scores = _final(_scores(q, k), positions, key_positions, spec, x.bias)
    p = modified(mod, scores, seen[:, :, None], x.sinks)
    out: Tensor = torch.matmul(p.flatten(2, 3), v.float())
    return out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype)


def _in_cache(x: AttendInputs, k: Tensor, v: Tensor, key_positions: Tensor, seen: Tensor) -> Tensor:
    """Many queries that count positions in the cache; seen: bool [B, 1, S, T].

    Counted in the cache, a sink stands nearer to late queries than its own position says: sinks and the rest
    have their distances from different places. Only distances matter to RoPE and to a relative bias, so the
    rest may be counted from any base; the oldest live token keeps the table short.
    """
    spec, q, positions = x.spec, x.q, x.positions
    retention = spec.layout.retention
    assert retention.window is not None
    budget = retention.sinks + retention.window
    base = (x.seq_lens - budget).clamp(min=0)[:, None]
    capped = positions.clamp(max=budget - 1)
    if x.rope:

        def turn(vectors: Tensor, places: Tensor) -> Tensor:
            return rotate(vectors, places, *x.rope, form=spec.rotary)

        scores = _scores(turn(q, positions - base), turn(k, key_positions - base))
        to_sinks = _scores(turn(q, capped), turn(k, key_positions))
    else:
        scores = to_sinks = _scores(q, k)
    is_sink = ((key_positions >= 0) & (key_positions < retention.sinks))[:, None, None, None]
    near = _final(to_sinks, capped, key_positions, spec, x.bias)
    scores = torch.where(is_sink, near, _final(scores, positions, key_positions, spec, x.bias))
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    mod = applied(spec.score.mod, positions, key_positions, heads, x.leaves)
    to_near = applied(spec.score.mod, capped, key_positions, heads, x.leaves)
    if mod is None or to_near is None:
        p = modified(None, scores, seen[:, :, None], x.sinks)
    else:
        # By distance, which for sinks is another one.
        scores = torch.where(is_sink, to_near.scores(scores), mod.scores(scores))
        shown, shown_near = mod.seen(), to_near.seen()
        seen = seen[:, :, None]
        if shown is not None and shown_near is not None:
            seen = seen & torch.where(is_sink, shown_near, shown)
        p = mod.weights(probabilities(scores.masked_fill(~seen, float("-inf")), x.sinks))
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
