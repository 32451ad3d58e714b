"""What a cache notes of pages of keys, and the pages that a step reads by it (Quest, `layouts/selection/top_pages.py`).

Shapes: smallest, largest [B, Hkv, P, D] in the model's dtype, a row per page of tokens; read int32 [B, Hkv, K], the
pages of the last step, ascending, -1 where fewer were read or the last pass read all.

The bounds between the two are the reference's and the kernels' own; `kernels/oracle/selection.py` says all of it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.layouts import TopPages


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
    keys = _rows(k, column.clamp(0, many - 1)[:, None])
    before = page * size < start.clamp(min=0)  # whether the page has older tokens
    none = (end < 0).expand_as(before)
    batch = torch.arange(k.shape[0], device=k.device)[:, None, None]
    head = torch.arange(k.shape[1], device=k.device)[None, :, None]
    for buffer, sign in ((smallest, 1), (largest, -1)):
        # The smallest of the negated is the largest negated.
        own = (sign * keys).masked_fill(~new[:, None, :, None], float("inf"))
        least = own.unflatten(2, (-1, size)).amin(3)
        old = sign * _rows(buffer, page[:, None])
        least = torch.where(before[:, None, :, None], torch.minimum(least, old), least)
        least = torch.where(none[:, None, :, None], old, least)
        buffer.index_put_((batch, head, page[:, None]), sign * least)


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


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, 1, N] of x [B, H, rows, D]."""
    return torch.gather(x, 2, index[..., None].expand(-1, x.shape[1], -1, x.shape[3]))
