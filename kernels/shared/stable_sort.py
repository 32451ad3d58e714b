"""Sorting as a dialect has it (`dialect.py`): the order of numbers, and the place of each in it.

A target whose sort is limited in size, or breaks ties as it likes, counts instead: the place of x_i is

    #{j : x_j before x_i} + #{j < i : x_j = x_i}

which is a stable order of any size, for n^2 comparisons.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.shared.dialect import current


def order(x: Tensor, *, descending: bool = False, stable: bool = False) -> Tensor:
    """Indices int64 [..., n] that sort the last axis of x [..., n]; stable: equals keep their order."""
    if not current().counts:
        # Without a word of stability where none is meant: exporters know that form only.
        return x.argsort(dim=-1, descending=descending, stable=True) if stable else x.argsort(-1, descending)
    return inverse(places(x, descending=descending))


def places(x: Tensor, *, descending: bool = False) -> Tensor:
    """The place int64 [..., n] of each number of x [..., n] in the order of the last axis."""
    if not current().counts:
        return inverse(order(x, descending=descending))
    mine, other = x[..., :, None], x[..., None, :]
    index = torch.arange(x.shape[-1], device=x.device)
    before = other > mine if descending else other < mine
    before = before | ((other == mine) & (index[None] < index[:, None]))
    return before.sum(-1)


def inverse(order: Tensor) -> Tensor:
    """The inverse of permutations int64 [..., n]: from order to places, and back."""
    count = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, count)
