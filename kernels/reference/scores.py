"""Computes what stands between scaled scores and probabilities, for queries and keys at any positions.

    s = softcap * tanh(s / softcap);  s = s + bias(query, key);  p = softmax([s, sink])[:-1]

Softcap: Gemma 2. Bias: ALiBi (Press et al. 2021), T5's relative bias, any table. Sinks: gpt-oss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.specs import BiasSpec


def soft_capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else cap * torch.tanh(scores / cap)


def bias_at(spec: BiasSpec, values: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The bias of keys at positions `key` [B, T] for queries at `query` [B, S]: fp32 [B, H, S, T], H = Hq or 1.

    Rows of padding (negative `query`) have none; positions that hold no token (negative `key`) have any value.
    """
    q, k = query[:, :, None], key[:, None, :]
    match spec.kind:
        case "alibi":
            bias = -values[:, None, None] * (q - k)[:, None].float()
        case "relative":
            bias = values[:, (q - k).clamp(0, values.shape[1] - 1)].movedim(0, 1)
        case "columns":
            bias = (values[:, k.clamp(min=0)] - values[:, q.clamp(min=0)]).movedim(0, 1)
        case "table":
            bias = values[:, q.clamp(min=0), k.clamp(min=0)].movedim(0, 1)
    # A table may hide every key from position 0 on: a row of padding must keep something to sum to.
    return torch.where(q[:, None] < 0, 0.0, bias)


def bias_by_heads(spec: BiasSpec, values: Tensor, query: Tensor, key: Tensor, group: int) -> Tensor:
    """`bias_at` where KV heads hold different tokens: query [B, S], key [B, Hkv or 1, T] -> fp32 [B, Hkv, G, S, T].

    The bias has a head for every query head, or one for all; the result's heads are 1 where all are alike.
    """
    q, k = query[:, None, None, :, None], key[:, :, None, None]
    heads = values.shape[0]
    shape = (1, 1) if heads == 1 else (heads // group, group)
    head = torch.arange(heads, device=values.device).view(1, *shape, 1, 1)
    match spec.kind:
        case "alibi":
            bias = -values[head] * (q - k).float()
        case "relative":
            bias = values[head, (q - k).clamp(0, values.shape[1] - 1)]
        case "columns":
            bias = values[head, k.clamp(min=0)] - values[head, q.clamp(min=0)]
        case "table":
            bias = values[head, q.clamp(min=0), k.clamp(min=0)]
    return torch.where(q < 0, 0.0, bias)


def grouped(bias: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq or 1, ...] -> [B, Hkv or 1, G or 1, ...]."""
    return bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (num_kv_heads, -1))


def probabilities(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [B, Hkv, G, .., T], with a sink logit per head (sinks [Hkv * G]) where there is one."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().reshape(*scores.shape[1:3], *[1] * (scores.dim() - 3))
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    p = torch.exp(scores - top)
    return p / (p.sum(-1, keepdim=True) + torch.exp(sink - top))
