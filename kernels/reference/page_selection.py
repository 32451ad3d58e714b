"""Quest's pages in the reference: which of them a step reads (`layouts/selection/top_pages.py`), and their slots.

The summaries and what is noted of them are in `kernels/shared/page_summaries.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.reference import paged
from kvcompile.kernels.reference.residual import take
from kvcompile.kernels.shared.page_summaries import highest
from kvcompile.layouts import InKeys, Storage, TopPages


def choose(
    selection: TopPages,
    q: Tensor,
    sm_scale: float,
    smallest: Tensor,
    largest: Tensor,
    position: Tensor,
    span: int,
) -> Tensor:
    """The pages that a step reads, int64 [B, Hkv, K], ascending: as many at any length, so that shapes stay.

    q: [B, Hq, 1, D] as attention gets it; position: [B, 1]. Where fewer pages have tokens, some without are among them.
    """
    pages = (span + selection.page_size - 1) // selection.page_size
    heads = (smallest.shape[1], q.shape[1] // smallest.shape[1])
    scaled = q.squeeze(2).unflatten(1, heads).float() * sm_scale
    above = torch.matmul(scaled.clamp(min=0), largest[:, :, :pages].float().transpose(-1, -2))
    below = torch.matmul(scaled.clamp(max=0), smallest[:, :, :pages].float().transpose(-1, -2))
    bound = (above + below).amax(2)
    page = torch.arange(pages, device=q.device)
    newest = position.clamp(min=0)[:, None] // selection.page_size
    bound = torch.where(page > newest, float("-inf"), bound)
    return highest(selection, torch.where(page == newest, float("inf"), bound))


def slots_of(selection: TopPages, page: Tensor) -> Tensor:
    """The slots of pages [B, Hkv, K], [B, Hkv, K * page_size]."""
    inside = torch.arange(selection.page_size, device=page.device)
    return (page[..., None] * selection.page_size + inside).flatten(2)


def gathered(
    storage: Storage | InKeys, parts: list[Tensor], slot: Tensor, span: int, table: Tensor | None
) -> list[Tensor]:
    """The parts at `slot` [B, Hkv, N], or as they are where their rows are fixed: [B, Hkv, N, ...]."""
    own = storage.parts(128, torch.float32)
    slot = slot.clamp(max=span - 1)
    return [
        part if of.fixed else take(part, slot) if table is None else paged.at(part, table, slot)
        for part, of in zip(parts, own, strict=True)
    ]
