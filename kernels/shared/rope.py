"""Rotary embedding from a table, for layouts that keep keys before RoPE (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.specs import RotaryForm


def rotate(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, form: RotaryForm | None = None
) -> Tensor:
    """x [B, H, T, D] at positions [B, T], or [B, H or 1, T] -> rotated x, in x's dtype.

    cos, sin [P, R] are tabulated over positions 0 .. P - 1, R <= D the rotated channels:
    out = x * cos + rotate(x) * sin there, rotate((a, b)) = (-b, a) on the pairs that `form` says; without a form,
    on the halves of the first R channels.
    """
    form = form or RotaryForm("half", 0, cos.shape[-1])
    index = positions.clamp(0, cos.shape[0] - 1)
    index = index[:, None] if index.dim() == 2 else index
    c, s = cos[index], sin[index]
    end = form.start + form.rotary_dim
    before, turned, after = x[..., : form.start], x[..., form.start : end], x[..., end:]
    if form.style == "half":
        a, b = turned.chunk(2, dim=-1)
        across = torch.cat([-b, a], dim=-1)
    else:
        a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
        across = torch.stack([-b, a], dim=-1).flatten(-2)
    out = (turned * c + across * s).to(x.dtype)
    parts = [part for part in (before, out, after) if part.shape[-1]]
    return out if len(parts) == 1 else torch.cat(parts, dim=-1)


def rotated_first(
    q: Tensor, k: Tensor, positions: Tensor, rope: list[Tensor], spec: SiteSpec
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """New queries and keys [B, H, S, D] as attention and cache take them, and the tables that are still to be used.

    Where `spec.rotates_on_append`, both are turned here, at their own positions [B, S], and no table is left.
    """
    if not spec.rotates_on_append:
        return q, k, rope
    q, k = (rotate(x, positions, *rope, form=spec.rotary) for x in (q, k))
    return q, k, []
