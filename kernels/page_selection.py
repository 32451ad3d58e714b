"""Quest's pages in the reference: summaries of keys, and which pages a step reads (`layouts/selection/top_pages.py`).

Shapes: smallest, largest [B, Hkv, P, D] in the keys' dtype, a row per page of tokens; read int32 [B, Hkv, K], the pages
of the last step, ascending, -1 where fewer were read or the last pass read all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels import paged
from kvcompile.kernels.recent import take
from kvcompile.layouts import InKeys, Storage, TopPages


def summarise(selection: TopPages, k: Tensor, positions: Tensor, smallest: Tensor, largest: Tensor) -> None:
    """Take new keys k [B, Hkv, S, D] at `positions` [B, S] into the summaries of their pages.

    A page begins anew with its first token, so what stood there before needs no clearing. Padding is left out.
    """
    size, many = selection.page_size, k.shape[2]
    start, end = positions[:, :1], positions[:, -1:]
    # The pages that the tokens touch, the last of them again where fewer than the most that S can touch.
    count = (many + size - 2) // size + 1
    first, last = start.clamp(min=0) // size, end.clamp(min=0) // size
    page = torch.minimum(first + torch.arange(count, device=k.device), last)
    token = page[:, :, None] * size + torch.arange(size, device=k.device)
    column = (token - start[:, :, None]).flatten(1)
    new = (column >= 0) & (column < many)
    keys = take(k, column.clamp(0, many - 1))
    before = page * size < start.clamp(min=0)  # whether the page has older tokens
    none = (end < 0).expand_as(before)
    batch = torch.arange(k.shape[0], device=k.device)[:, None, None]
    head = torch.arange(k.shape[1], device=k.device)[None, :, None]
    for buffer, sign in ((smallest, 1), (largest, -1)):
        # The smallest of the negated is the largest negated.
        own = (sign * keys).masked_fill(~new[:, None, :, None], float("inf"))
        least = own.unflatten(2, (-1, size)).amin(3)
        old = sign * take(buffer, page)
        least = torch.where(before[:, None, :, None], torch.minimum(least, old), least)
        least = torch.where(none[:, None, :, None], old, least)
        buffer.index_put_((batch, head, page[:, None]), sign * least)


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


def highest(selection: TopPages, bound: Tensor) -> Tensor:
    """The pages with the highest of the bounds [B, Hkv, P], int64 [B, Hkv, K], ascending.

    bound: inf for the page that is read in any case, -inf for pages without tokens
    """
    more = bound.new_full((*bound.shape[:2], selection.pages), float("-inf"))
    found = torch.cat([bound, more], dim=-1).topk(selection.pages, dim=-1, sorted=False).indices
    return found.sort(-1).values


def note(read: Tensor, page: Tensor | None, position: Tensor, selection: TopPages) -> None:
    """Write down the pages [B, Hkv, K] that have been read, in `read`; None: all."""
    if page is None:
        read.fill_(-1)
        return
    newest = position.clamp(min=0)[:, None] // selection.page_size
    read.copy_(torch.where(page <= newest, page, -1))


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
