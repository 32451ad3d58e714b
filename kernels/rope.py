"""Rotary embedding from a table, for layouts that keep keys before RoPE (Su et al. 2021, half style)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D] at positions [B, T] -> rotated x, in x's dtype.

    cos, sin [P, R] are tabulated over positions 0 .. P - 1, R <= D the rotated channels:
    out = x * cos + rotate(x) * sin on the first R channels, rotate((a, b)) = (-b, a) on their halves.
    """
    rotary_dim = cos.shape[-1]
    index = positions.clamp(0, cos.shape[0] - 1)
    c, s = cos[index][:, None], sin[index][:, None]
    turned, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = turned.chunk(2, dim=-1)
    out = turned * c + torch.cat([-b, a], dim=-1) * s
    out = out.to(x.dtype)
    return out if rotary_dim == x.shape[-1] else torch.cat([out, passed], dim=-1)
