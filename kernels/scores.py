"""What stands between the scaled scores and the probabilities, for queries and keys at any positions.

    s = softcap * tanh(s / softcap);  s = s + bias(query, key);  p = softmax([s, sink])[:-1]

Softcap: Gemma 2. Bias: ALiBi (Press et al. 2021), T5's relative bias, any table. Sinks: gpt-oss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.types import BiasSpec


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
