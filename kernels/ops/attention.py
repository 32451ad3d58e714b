"""`kvcompile::attention`: what every attention block becomes before a cache is chosen for it.

    out[b, h, i] = sum_j softmax_j(f(sm_scale * q[b, h, i] . k[b, h // G, j])) v[b, h // G, j],   G = Hq / Hkv

over the keys j that the mask shows (`types.MaskSpec`); f adds softcap, bias and sinks (`types.ScoreSpec`).
Queries and keys are the same full sequence: this op has no cache; `insert_cache` replaces it by one that has.
"""

from __future__ import annotations

import json
from typing import cast

import torch
from torch import Tensor

from kvcompile.expression import ScoreMod
from kvcompile.kernels.oracle.scores import final_scores, modified, shown
from kvcompile.specs import BiasKind, BiasSpec, MaskKind, MaskSpec, ScoreSpec

LIBRARY = torch.library.Library("kvcompile", "FRAGMENT")
LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, float sm_scale, str mask, int window, int layer, *, "
    "float? softcap=None, Tensor? sinks=None, str? bias_kind=None, Tensor? bias=None, str? mod=None, "
    "Tensor[]? leaves=None) "
    "-> Tensor"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    mask: str,
    window: int,
    layer: int,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias_kind: str | None = None,
    bias: Tensor | None = None,
    mod: str | None = None,
    leaves: list[Tensor] | None = None,
) -> Tensor:
    """Full-sequence attention.

    q: [B, Hq, S, D], k: [B, Hkv, S, D], v: [B, Hkv, S, Dv], one floating dtype -> [B, Hq, S, Dv].
    mask: a MaskKind; window: its window or chunk, -1 where it has none. layer: names the site.
    sinks: [Hq]; bias: in the form that `bias_kind` says. A bias of limited reach limits S.
    mod: a `ScoreMod` as JSON; leaves: the tensors that it reads.
    """
    index = torch.arange(q.shape[2], device=q.device)
    seen = shown(MaskSpec(cast(MaskKind, mask), None if window < 0 else window), index, index)
    if softcap is None and sinks is None and bias is None and mod is None:
        causal = mask == "causal"
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if causal else seen,
            is_causal=causal,
            scale=sm_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    spec = ScoreSpec(softcap, None if bias_kind is None else BiasSpec(cast(BiasKind, bias_kind)))
    scores = final_scores(q.float() @ k.transpose(-1, -2) * sm_scale, spec, bias, index, index)
    p = modified(None if mod is None else ScoreMod.from_dict(json.loads(mod)), scores, seen, sinks, leaves)
    out: Tensor = (p @ v).to(q.dtype)
    return out


LIBRARY.impl("attention", attention, "CompositeImplicitAutograd")
