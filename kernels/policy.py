"""The oracle of a policy: full-sequence attention that forgets and rounds as a layout does, with no cache.

Every query's row is computed from the whole sequence: which keys the policy has kept by then, each key as its
storage gives it back, and (positions in_cache) rotated to its place among those kept. There are no slots, no
chunks and no steps here, so nothing of the address arithmetic under test is shared with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels import codec
from kvcompile.kernels.rope import rotate
from kvcompile.kernels.spec import SiteSpec


def policy_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: SiteSpec, rope: list[Tensor], padding: Tensor | None = None
) -> Tensor:
    """q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] of whole sequences -> [B, Hq, T, Dv], in q's dtype.

    Args:
        rope: [cos, sin] tables where the layout counts positions in the cache (q and k before RoPE), else [].
        padding: int64 [B], padded tokens on the left of each sequence; their rows mean nothing.
    """
    layout = spec.layout
    k = codec.decode(layout.keys, codec.encode(layout.keys, k), k.dtype)
    v = codec.decode(layout.values, codec.encode(layout.values, v), v.dtype)
    rows = []
    for row in range(q.shape[0]):
        first = 0 if padding is None else int(padding[row])
        out = _sequence(q[row, :, first:], k[row, :, first:], v[row, :, first:], spec, rope)
        rows.append(torch.cat([out.new_zeros(out.shape[0], first, out.shape[2]), out], dim=1))
    return torch.stack(rows)


def _sequence(q: Tensor, k: Tensor, v: Tensor, spec: SiteSpec, rope: list[Tensor]) -> Tensor:
    """One sequence, no padding: q [Hq, T, D] -> [Hq, T, Dv]."""
    group = q.shape[0] // k.shape[0]
    index = torch.arange(q.shape[1], device=q.device)
    kept = torch.stack([_kept(i, index, spec) for i in range(len(index))])
    if not spec.layout.retention.in_cache:
        scores = q.float() @ k.repeat_interleave(group, 0).float().transpose(-1, -2) * spec.sm_scale
        p = scores.masked_fill(~kept, float("-inf")).softmax(-1)
        return (p @ v.repeat_interleave(group, 0).float()).to(q.dtype)
    out = []
    for i in range(len(index)):
        tokens = index[kept[i]]
        place = torch.arange(len(tokens), device=q.device)[None]
        q_i = rotate(q[None, :, i : i + 1], place[:, -1:], *rope)[0].float()
        k_i = rotate(k[None, :, tokens], place, *rope)[0].repeat_interleave(group, 0).float()
        p = (q_i @ k_i.transpose(-1, -2) * spec.sm_scale).softmax(-1)
        out.append(p @ v[:, tokens].repeat_interleave(group, 0).float())
    return torch.cat(out, dim=1).to(q.dtype)


def _kept(query: int, index: Tensor, spec: SiteSpec) -> Tensor:
    """Which tokens the query at position `query` still finds, bool [T]."""
    kept = index <= query
    if spec.mask_window is not None:
        kept &= index > query - spec.mask_window
    retention = spec.layout.retention
    if retention.window is not None:
        kept &= (index > query - retention.window) | (index < retention.sinks)
    return kept
