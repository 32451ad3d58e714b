"""Computes attention of many new queries against decoded keys and values, in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import visibility
from kvcompile.kernels.reference.score_mod import applied, modified
from kvcompile.kernels.reference.scores import bias_at, grouped, soft_capped
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec


def attend_many(
    x: AttendInputs, k: Tensor, v: Tensor, key_positions: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """x.q [B, Hq, S, D] against k [B, Hkv, T, D], v [B, Hkv, T, Dv] at key_positions [B, T] -> [B, Hq, S, Dv].

    allowed: which of the keys each query may see, besides what positions say, bool [B, S, T]; None: all.
    """
    spec, q, positions = x.spec, x.q, x.positions
    seen = visible(x, key_positions, allowed)
    if x.rope:
        q, k = (
            rotate(q, positions, *x.rope, form=spec.rotary),
            rotate(k, key_positions, *x.rope, form=spec.rotary),
        )
    grouped_heads = q.shape[1] != k.shape[1]
    mod = applied(spec.score.mod, positions, key_positions, (k.shape[1], q.shape[1] // k.shape[1]), x.leaves)
    if mod is not None and replace(spec.score, mod=None).plain and mod.masks_only:
        hidden = mod.seen()
        seen = seen if hidden is None else (seen[:, :, None] & hidden).flatten(1, 2)
        return F.scaled_dot_product_attention(q, k, v, seen, scale=spec.sm_scale, enable_gqa=grouped_heads)
    if spec.score.plain:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=spec.sm_scale, enable_gqa=grouped_heads)
    scores = final(raw(q, k), positions, key_positions, spec, x.bias)
    p = modified(mod, scores, seen[:, :, None], x.sinks)
    out: Tensor = torch.matmul(p.flatten(2, 3), v.float())
    return out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype)


def visible(x: AttendInputs, key_positions: Tensor, allowed: Tensor | None) -> Tensor:
    """Which keys each query sees, bool [B, 1, S, T]; arguments as of `attend_many`."""
    seen = visibility.visible(x.positions[:, :, None], key_positions[:, None], x.spec)
    if allowed is not None:
        seen = seen & (allowed | (x.positions < 0)[:, :, None])
    return seen[:, None]


def final(scores: Tensor, query: Tensor, key: Tensor, spec: SiteSpec, bias: Tensor | None) -> Tensor:
    """Raw scores [B, Hkv, G, S, T] scaled, capped and with their bias, for queries and keys at those places."""
    scores = soft_capped(scores * spec.sm_scale, spec.score.softcap)
    if spec.score.bias is None:
        return scores
    assert bias is not None
    return scores + grouped(bias_at(spec.score.bias, bias, query, key), scores.shape[1])


def raw(q: Tensor, k: Tensor) -> Tensor:
    """[B, Hq, S, D] x [B, Hkv, T, D] -> fp32 [B, Hkv, G, S, T]."""
    group = q.shape[1] // k.shape[1]
    # The queries of a group are rows of one product: K is not repeated for each of them.
    rows = q.unflatten(1, (k.shape[1], group)).flatten(2, 3).float()
    scores: Tensor = torch.matmul(rows, k.float().transpose(-1, -2))
    return scores.reshape(*k.shape[:2], group, q.shape[2], k.shape[2])
