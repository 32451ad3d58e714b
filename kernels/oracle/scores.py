"""Computes what stands between scores and weights, for the oracle: mask, softcap, bias, expression, softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompile.expression import ScoreMod
from kvcompile.kernels.shared.expression import Places, evaluate
from kvcompile.specs import MaskSpec, ScoreSpec


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

    seen: bool [Q, K]; leaves: as `oracle.attention` has them; at: positions of the queries [Q] and keys [K], where they
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


def shown(mask: MaskSpec, query: Tensor, key: Tensor) -> Tensor:
    """What a mask shows queries at positions [Q] of keys at [K], bool [Q, K]; an explicit one hides by its bias too."""
    query, key = query[:, None], key[None]
    seen = key <= query
    if mask.kind == "sliding":
        assert mask.window is not None
        seen &= query - key < mask.window
    if mask.kind == "chunked":
        assert mask.window is not None
        seen &= key >= query - query % mask.window
    return seen
