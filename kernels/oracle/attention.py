"""The oracle of a policy: full-sequence attention that forgets and rounds as a layout does, with no cache.

Every query's row is computed from the whole sequence: which keys the policy has kept by then, each key as its
storage gives it back by then (`kernels/oracle/quantize.py`), and (positions in_cache) rotated to its place among those
kept. There are no slots, no chunks and no steps here, so nothing of the address arithmetic under test is shared
with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompile.expression import ScoreMod
from kvcompile.kernels.oracle import quantize
from kvcompile.kernels.oracle.kept import kept_keys
from kvcompile.kernels.shared.expression import Places, evaluate
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import InKeys, Storage
from kvcompile.specs import MaskSpec, ScoreSpec

Scales = tuple[Tensor | None, Tensor | None]


def policy_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: SiteSpec,
    rope: list[Tensor],
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: Sequence[Tensor] | None = None,
    scales: Scales = (None, None),
    read: Tensor | None = None,
) -> Tensor:
    """q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] of whole sequences -> [B, Hq, T, Dv], in q's dtype.

    Args:
        rope: [cos, sin] tables where the layout keeps keys before RoPE (q and k are then before it), else [].
        padding: int64 [B], padded tokens on the left of each sequence; their rows mean nothing.
        sinks: logits [Hq]; bias: as `spec.score.bias` says; None where the site has none.
        leaves: what `spec.score.mod` reads, of the whole sequences: [B, T, ..] of tokens, [B or 1, T, T, ..] of pairs.
        scales: the calibrated scales of K and V, fp32 [Hkv] each; None where their storage has none.
        read: which keys each query reads, bool [B, Hq, T, T] (`selection.py`); None: all that it is shown.
    """
    rows = []
    for row in range(q.shape[0]):
        first = 0 if padding is None else int(padding[row])
        own = leaves_of(spec.score.mod, leaves or (), row, first)
        shown = None if read is None else read[row, :, first:, first:]
        out = _sequence(
            q[row, :, first:],
            k[row, :, first:],
            v[row, :, first:],
            spec,
            rope,
            sinks,
            bias,
            own,
            scales,
            shown,
        )
        rows.append(torch.cat([out.new_zeros(out.shape[0], first, out.shape[2]), out], dim=1))
    return torch.stack(rows)


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: SiteSpec,
    rope: list[Tensor],
    sinks: Tensor | None,
    bias: Tensor | None,
    leaves: Sequence[Tensor],
    scales: Scales,
    read: Tensor | None = None,
) -> Tensor:
    """One sequence, no padding: q [Hq, T, D], k [Hkv, T, D], v [Hkv, T, Dv] -> [Hq, T, Dv]."""
    layout = spec.layout
    group = q.shape[0] // k.shape[0]
    index = torch.arange(q.shape[1], device=q.device)
    kept = shown(spec.mask, index) & kept_keys(layout.retention, index)
    kept = kept if read is None else kept & read
    ks = quantize.older_and_newest(layout.keys, k, scales[0])
    k_full = v_full = _in_full(layout.keys, index)
    if isinstance(layout.values, InKeys):
        vs = (ks[0][..., : layout.values.channels], ks[1][..., : layout.values.channels])
    else:
        vs = quantize.older_and_newest(layout.values, v, scales[1])
        v_full = _in_full(layout.values, index)
    ks, vs = ((a.repeat_interleave(group, 0), b.repeat_interleave(group, 0)) for a, b in (ks, vs))
    if not layout.retention.in_cache:
        if rope:
            q, older, newest = (rotate(x[None], index[None], *rope, form=spec.rotary)[0] for x in (q, *ks))
            ks = (older, newest)
        older, newest = (q.float() @ x.float().transpose(-1, -2) * spec.sm_scale for x in ks)
        scores = final_scores(torch.where(k_full, newest, older), spec.score, bias, index, index)
        p = modified(spec.score.mod, scores[None], kept, sinks, leaves)[0]
        return (p.masked_fill(v_full, 0) @ vs[0].float() + p.masked_fill(~v_full, 0) @ vs[1].float()).to(
            q.dtype
        )
    out = []
    for i in range(len(index)):
        tokens = index[kept[i]]
        place = torch.arange(len(tokens), device=q.device)[None]
        q_i = q[None, :, i : i + 1]
        k_i, v_i = (
            torch.where(full[i, tokens, None], x[1][:, tokens], x[0][:, tokens])[None]
            for x, full in ((ks, k_full), (vs, v_full))
        )
        if rope:
            q_i, k_i = (
                rotate(q_i, place[:, -1:], *rope, form=spec.rotary),
                rotate(k_i, place, *rope, form=spec.rotary),
            )
        scores = q_i[0].float() @ k_i[0].float().transpose(-1, -2) * spec.sm_scale
        # As if the kept tokens were the whole sequence, of which this query is the last.
        scores = final_scores(scores, spec.score, bias, place[0, -1:], place[0])
        every = torch.ones(1, len(tokens), dtype=torch.bool, device=q.device)
        at = (place[0, -1:], place[0])
        p = modified(spec.score.mod, scores[None], every, sinks, leaves, at)[0]
        out.append(p @ v_i[0].float())
    return torch.cat(out, dim=1).to(q.dtype)


def _in_full(storage: Storage, index: Tensor) -> Tensor:
    """Which tokens each query sees as the newest ones come back, bool [T, T]."""
    first = [quantize.newest_from(storage, i + 1) for i in range(len(index))]
    return index[None] >= torch.tensor(first, device=index.device)[:, None]


def final_scores(
    scores: Tensor, spec: ScoreSpec, values: Tensor | None, query: Tensor, key: Tensor
) -> Tensor:
    """Scaled scores [.., Hq, Q, K] with softcap and bias, for queries at positions [Q] and keys at [K]."""
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.bias is None:
        return scores
    assert values is not None
    match spec.bias.kind:
        case "alibi":
            bias = values[:, None, None] * (key[None] - query[:, None])
        case "relative":
            bias = values[:, (query[:, None] - key[None]).clamp(min=0)]
        case "columns":
            bias = values[:, None, key] - values[:, query, None]
        case "table":
            bias = values[:, query][:, :, key]
    return scores + bias


def modified(
    mod: ScoreMod | None,
    scores: Tensor,
    seen: Tensor,
    sinks: Tensor | None,
    leaves: Sequence[Tensor] | None = None,
    at: tuple[Tensor, Tensor] | None = None,
    first: int = 0,
) -> Tensor:
    """What weighs the values, from scores [B, Hq, Q, K] that are scaled, capped and have their bias.

    seen: bool [Q, K]; leaves: as `policy_attention` has them; at: positions of the queries [Q] and keys [K], where they
    are not 0, 1, 2, ..; first: the number of the first head
    """
    if mod is None:
        return softmax_with_sink(scores.masked_fill(~seen, float("-inf")), sinks)
    batch, heads, rows, columns = scores.shape
    query, key = at or (torch.arange(size, device=scores.device) for size in (rows, columns))
    places = Places(query.expand(batch, -1), key.expand(batch, -1), (heads, 1), leaves or (), first)
    five = scores[:, :, None]
    wanted = [number for number in (mod.score, mod.mask, mod.weight) if number is not None]
    found = dict(zip(wanted, evaluate(mod, wanted, places, five), strict=True))
    if mod.score is not None:
        scores = (found[mod.score] + torch.zeros_like(five))[:, :, 0]
    if mod.mask is not None:
        shown = torch.as_tensor(found[mod.mask], device=scores.device)
        seen = seen & (shown[:, :, 0] if shown.dim() else shown)
    p = softmax_with_sink(scores.masked_fill(~seen, float("-inf")), sinks)
    if mod.empty_rows:
        p = p.nan_to_num(0.0)
    if mod.weight is None:
        return p
    weight = torch.as_tensor(found[mod.weight], device=scores.device)
    p = p * (weight[:, :, 0] if weight.dim() else weight)
    return p if mod.renormalise is None else p / (p.sum(-1, keepdim=True) + mod.renormalise)


def leaves_of(mod: ScoreMod | None, leaves: Sequence[Tensor], row: int, first: int) -> list[Tensor]:
    """The leaves of one sequence without its first (padded) columns."""
    found = []
    for kind, leaf in zip(mod.leaves if mod is not None else (), leaves, strict=True):
        if kind != "table":
            row_of = min(row, leaf.shape[0] - 1)
            leaf = leaf[row_of : row_of + 1, first:]
        found.append(leaf[:, :, first:] if kind == "pair" else leaf)
    return found


def softmax_with_sink(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over [scores, sink] with the sink's column dropped: scores [.., Hq, T, T'], sinks [Hq]."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def shown(mask: MaskSpec, index: Tensor) -> Tensor:
    """What the queries at positions `index` [T] see of the keys there, bool [T, T]; an explicit mask also hides
    by its bias."""
    query, key = index[:, None], index[None]
    seen = key <= query
    if mask.kind == "sliding":
        assert mask.window is not None
        seen &= query - key < mask.window
    if mask.kind == "chunked":
        assert mask.window is not None
        seen &= key >= query - query % mask.window
    return seen
