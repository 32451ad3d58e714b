"""Biases of the scores that are functions of positions alone, and the form each is kept in.

| form | bias of query i and key j, head h | found in |
|---|---|---|
| alibi | -slope[h] * (i - j) | BLOOM, MPT (Press et al. 2021) |
| relative | table[h, i - j] | T5's buckets, any distance |
| columns | table[h, j] - table[h, i] | Falcon: ALiBi rounded to bfloat16 |
| table | table[h, i, j], -inf where an explicit mask hides | everything else |

A softmax does not see what a whole row has in common, so every row is taken relative to its own key (i = j).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.types import BiasKind

HIDDEN = (
    -1000.0
)  # a hidden key's score lies at least this far below the row's largest; -1e4, finfo.min, -inf do


@dataclass(frozen=True)
class Bias:
    """A bias and its values as `types.BiasSpec` has them: fp32."""

    kind: BiasKind
    values: Tensor

    @property
    def reach(self) -> int | None:
        return None if self.kind == "alibi" else int(self.values.shape[1])


def shown(level: Tensor) -> Tensor:
    """Which keys a softmax input [.., S, S] for zero scores shows."""
    top = level.amax(-1, keepdim=True)
    return level > torch.where(top > HIDDEN, top, 0.0) + HIDDEN  # a row that hides everything stays hidden


def centered(level: Tensor, visible: Tensor) -> Tensor:
    """The bias relative to each query's own key; 0 where hidden."""
    return torch.where(visible, level - level.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), 0.0)


def tolerance(level: Tensor, visible: Tensor) -> float:
    """What rounding in float32 explains."""
    largest = float(torch.where(visible, level, 0.0).abs().max())
    return 1e-6 + 8 * torch.finfo(torch.float32).eps * largest


def slopes(level: Tensor, visible: Tensor) -> Tensor | None:
    """ALiBi's slopes [H] of a level [H, S, S], or None where it is not linear in the distance."""
    bias, distance = centered(level, visible), _distance(level)
    seen = torch.where(visible, distance, 0).double()
    found = -(bias.double() * seen).sum((-2, -1)) / seen.square().sum((-2, -1)).clamp(min=1)
    return found if is_flat(without(level, found), visible, tolerance(level, visible)) else None


def without(level: Tensor, slope: Tensor | None) -> Tensor:
    """The level without an ALiBi of these slopes [H]."""
    return level if slope is None else level + slope[:, None, None].to(level.dtype) * _distance(level)


def is_flat(level: Tensor, visible: Tensor, allowed: float) -> bool:
    """Whether a query's visible keys all get the same, up to `allowed`."""
    return float(centered(level, visible).abs().max()) <= allowed


def tabulated(level: Tensor, visible: Tensor, explicit: bool) -> Bias:
    """The bias of a level [H, N, N] in the smallest form that holds it; `explicit`: with what the mask hides."""
    bias = centered(level, visible)
    bias = torch.where(visible, bias, -torch.inf) if explicit else bias
    if bool((bias == bias[:1]).all()) and bool((visible == visible[:1]).all()):
        bias, visible = bias[:1], visible[:1]
    allowed = tolerance(level, visible)
    by_distance = _relative(bias, visible, explicit, allowed)
    if by_distance is not None:
        return Bias("relative", by_distance.float())
    if not explicit and bool((visible == torch.ones_like(visible).tril()).all()):
        column = level[: len(bias), -1] - level[: len(bias), -1, :1]
        wanted = torch.where(visible, column[:, None] - column[:, :, None], 0.0)
        if float((bias - wanted).abs().max()) <= allowed:
            return Bias("columns", column.float())
    return Bias("table", bias.float())


def _relative(bias: Tensor, visible: Tensor, explicit: bool, allowed: float) -> Tensor | None:
    """Values by distance [H, N], or None where they (or, for an explicit mask, what it shows) differ."""
    values = []
    for distance in range(bias.shape[-1]):
        found = bias.diagonal(offset=-distance, dim1=-2, dim2=-1)
        seen = visible.diagonal(offset=-distance, dim1=-2, dim2=-1)
        if explicit and not bool((seen == seen[:, :1]).all()):
            return None
        largest = found.masked_fill(~seen, -torch.inf).amax(-1)
        smallest = found.masked_fill(~seen, torch.inf).amin(-1)
        some = seen.any(-1)
        if bool((some & (largest - smallest > allowed)).any()):
            return None
        values.append(torch.where(some, largest, -torch.inf if explicit else 0.0))
    return torch.stack(values, dim=-1)


def _distance(level: Tensor) -> Tensor:
    position = torch.arange(level.shape[-1], device=level.device)
    return position[:, None] - position
