"""Says which keys each query reads where steps read pages, computed from whole sequences.

Said again from `layouts/selection/top_pages.py`, one query after the other: no summaries that grow, no slots, no
gathers. The pages of a step follow from the query and from all keys up to it.

Two pages whose bounds are equal but for rounding may be taken either way. So a caller that has run something else may
give what was read there: the oracle then reads that, and tells the bounds that it would have chosen by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcompile.kernels.oracle.choice import Choice
from kvcompile.layouts import Selection, TopPages


def read_by(
    selection: Selection,
    q: Tensor,
    k: Tensor,
    sm_scale: float,
    chunks: Sequence[int],
    padding: Tensor | None = None,
    held: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Choice]]:
    """Which keys each query reads, bool [B, Hq, T, T], besides what its mask says; and the choices of pages.

    Args:
        q, k: [B, Hq, T, D], [B, Hkv, T, D] of whole sequences, as attention gets them.
        chunks: how many columns came together, pass by pass; T in all.
        padding: int64 [B], padded columns on the left of each sequence.
        held: after each pass, the pages that were read [B, Hkv, K], -1 for none; None: as the oracle chooses.

    Raises:
        ValueError: `held` has another number of pages than a step reads, one without tokens, or lacks the newest.
    """
    assert isinstance(selection, TopPages)
    batch, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads
    read = torch.ones(batch, kv_heads, q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
    choices = []
    ends = torch.tensor(chunks).cumsum(0).tolist()
    for row in range(batch):
        first = 0 if padding is None else int(padding[row])
        for number, (columns, end) in enumerate(zip(chunks, ends, strict=True)):
            column = end - 1
            if columns != 1 or column < first:
                continue
            token = column - first
            page_of = torch.arange(token + 1, device=q.device) // selection.page_size
            count = int(page_of[-1]) + 1
            for head in range(kv_heads):
                queries = q[row, head * group : (head + 1) * group, column].float() * sm_scale
                keys = k[row, head, first:end].float()
                bounds = _bounds(queries, keys, page_of, count)
                forced = None if held is None else held[number][row, head]
                pages, choice = _pages(selection, bounds, forced, token)
                choices += [] if choice is None else [choice]
                read[row, head, column, first:end] = torch.isin(page_of, pages)
    return read.repeat_interleave(group, 1), choices


def _bounds(queries: Tensor, keys: Tensor, page_of: Tensor, count: int) -> Tensor:
    """For each page the most that any of its keys could score with any of the queries [G, D], fp32 [count]."""
    found = []
    for page in range(count):
        own = keys[page_of == page]
        low, high = own.min(0).values, own.max(0).values
        found.append(torch.maximum(queries * low, queries * high).sum(-1).max())
    return torch.stack(found)


def _pages(
    selection: TopPages, bounds: Tensor, forced: Tensor | None, token: int
) -> tuple[Tensor, Choice | None]:
    """The pages that a step reads, and the choice between the others; None where there was none."""
    newest, count = len(bounds) - 1, min(selection.pages, len(bounds))
    every = torch.arange(len(bounds), device=bounds.device)
    if count == len(bounds) and (forced is None or not bool((forced >= 0).any())):
        return every, None
    if forced is None:
        order = sorted(range(newest), key=lambda page: float(bounds[page]), reverse=True)
        pages = torch.tensor([*order[: count - 1], newest], device=bounds.device)
    else:
        pages = forced[forced >= 0].long()
        if len(pages.unique()) != count or len(pages) != count or not bool((pages == newest).any()):
            raise ValueError(
                f"read pages {pages.tolist()} at position {token}: expected {count} pages up to {newest}, with it"
            )
        if int(pages.max()) > newest:
            raise ValueError(f"read page {int(pages.max())} at position {token}, where {newest} is the last")
    if count == len(bounds) or count == 1:
        return pages, None
    return pages, Choice(bounds[:newest], ~torch.isin(every[:newest], pages))


# Which keys each query reads, and the choices of that, by the kind of the selection; arguments as of `read_by`.
READ: dict[str, Callable[..., tuple[Tensor, list[Choice]]]] = {TopPages.kind: read_by}
