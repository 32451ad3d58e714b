"""`kvcompile::attention`: what every attention block becomes before a cache is chosen for it.

    out[b, h, i] = sum_j softmax_j(sm_scale * q[b, h, i] . k[b, h // G, j]) v[b, h // G, j],   G = Hq / Hkv

over the keys j <= i, and j > i - window where window >= 0 (window = -1: causal). Queries and keys are the
same full sequence: this op has no cache; `insert_cache` replaces it by one that has.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("kvcompile", "FRAGMENT")
LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, float sm_scale, int window, int layer) -> Tensor")


def attention(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, window: int, layer: int) -> Tensor:
    """Full-sequence attention.

    q: [B, Hq, S, D], k: [B, Hkv, S, D], v: [B, Hkv, S, Dv], one floating dtype -> [B, Hq, S, Dv].
    window: tokens a query sees, its own included; -1 for all before it. layer: names the site.
    """
    grouped = q.shape[1] != k.shape[1]
    if window < 0:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=sm_scale, enable_gqa=grouped
        )
    position = torch.arange(q.shape[2], device=q.device)
    distance = position[:, None] - position[None, :]
    mask = (distance >= 0) & (distance < window)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=sm_scale, enable_gqa=grouped
    )


LIBRARY.impl("attention", attention, "CompositeImplicitAutograd")
