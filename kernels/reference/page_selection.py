"""Chooses the pages that a step of Quest reads (`layouts/selection/top_pages.py`), and their slots, in the reference.

The summaries and what is noted of them are in `kernels/shared/page_summaries.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.shared import page_summaries
from kvcompile.kernels.shared.page_summaries import highest
from kvcompile.layouts import TopPages


def select(x: AttendInputs) -> Tensor | None:
    """The slots [B, Hkv, N] that a step reads, None where it reads all; new keys are in the summaries then."""
    selection = x.spec.layout.selection
    assert isinstance(selection, TopPages)
    smallest, largest, read = x.notes
    page_summaries.summarise(selection, x.k, x.positions, smallest, largest)
    page = None
    # Of a known span all pages may be read: then it is the cache without a selection.
    if x.q.shape[2] == 1 and not (isinstance(x.span, int) and x.span <= selection.tokens):
        page = choose(selection, x.q, x.spec.sm_scale, smallest, largest, x.positions, x.span)
    page_summaries.note(read, page, x.positions, selection)
    return None if page is None else slots_of(selection, page)


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
