"""Defines the op of the role that a selection of pages adds; it carries its KernelSpec as a text (`ops_attend.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.triton.host.launch import launch
from kvcompile.kernels.triton.host.source import kernel_of
from kvcompile.kernels.triton.selection import page_bounds as bounds_role

_WARPS = 4


@torch.library.triton_op("kvcompile::triton_page_bounds", mutates_args={"smallest", "largest"})
def page_bounds(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    smallest: Tensor,
    largest: Tensor,
    pages: int,
    spec: str,
) -> Tensor:
    """The bounds of the first `pages` pages, float32 [B, Hkv, pages]; the new keys are in the summaries then.

    Args:
        q, k: [B, Hq, 1, D] and [B, Hkv, 1, D], after RoPE, dense in their last dimension.
        positions: int64 [B, 1].
        smallest, largest: [B, Hkv, P, D] in the model's dtype, P at least `pages`.
    """
    kernel = kernel_of(spec)
    bounds = q.new_empty((q.shape[0], kernel.spec.num_kv_heads, pages), dtype=torch.float32)
    tensors = {
        "q": q,
        "k": k,
        "positions": positions,
        "smallest": smallest,
        "largest": largest,
        "bounds": bounds,
    }
    grid = bounds_role.grid(kernel.spec, pages, q.shape[0])
    launch(kernel, grid, tensors, {"pages": pages}, num_warps=_WARPS)
    return bounds
