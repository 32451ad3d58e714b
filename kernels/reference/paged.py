"""Reads and writes rows of pools through page tables (`layouts/pages.py` says where a row stands).

Shapes: pool [pages, Hkv, rows_per_page, ...]; table int32 [B, pages of a sequence], 0 where there is no page yet, and
page 0 belongs to nobody. A row here is a row of the sequence's own array, as a placement without pages has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.reference import residual
from kvcompile.kernels.reference.symbolic import evaluate
from kvcompile.layouts import InKeys, Storage
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.pages import offset, page_index
from kvcompile.layouts.storage import is_fp8


def located(table: Tensor, rows: Tensor, rows_per_page: int) -> tuple[Tensor, Tensor]:
    """Page and row in it, int64 [B, N] each, of rows [B or 1, N]."""
    entry = evaluate(page_index(rows_per_page), {sy.slot: rows}).expand(table.shape[0], -1)
    return table.gather(1, entry).long(), evaluate(offset(rows_per_page), {sy.slot: rows})


def read(pool: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Rows [B or 1, N] of each sequence: [B, Hkv, N, ...]. Where there is no page, numbers that mean nothing."""
    page, row, head = _index(pool, table, rows)
    if is_fp8(pool.dtype):  # torch gathers no fp8
        return pool.view(torch.uint8)[page, head, row].view(pool.dtype)
    return pool[page, head, row]


def at(pool: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Rows [B, Hkv, N], each head's own, of each sequence: [B, Hkv, N, ...]."""
    size = pool.shape[2]
    page = table.gather(1, (rows // size).flatten(1)).view(rows.shape).long()
    head = torch.arange(pool.shape[1], device=pool.device)[None, :, None]
    if is_fp8(pool.dtype):  # torch gathers no fp8
        return pool.view(torch.uint8)[page, head, rows % size].view(pool.dtype)
    return pool[page, head, rows % size]


def write(pool: Tensor, table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Row rows[:, n] of each sequence becomes values [B, Hkv, n, ...]; rows [B, Hkv or 1, 1] are each head's own.

    Negative rows (padding) count from the end of the table, which no token of such a sequence reaches; heads' own are
    at least 0.
    """
    if rows.dim() == 3:
        head = torch.arange(pool.shape[1], device=pool.device)[None, :, None]
        page, row = (found[..., None] for found in located(table, rows.squeeze(2), pool.shape[2]))
        pool.index_put_((page, head, row), values)
        return
    rows = torch.remainder(rows, table.shape[1] * pool.shape[2])
    page, row, head = _index(pool, table, rows)
    pool.index_put_((page, head, row), values)


def overwrite(pool: Tensor, table: Tensor, part: Tensor, index: Tensor, which: Tensor) -> None:
    """Row r of each sequence becomes row index[:, r] of `part` where `which` [B, rows]; see `residual.overwrite`."""
    rows = torch.arange(which.shape[1], device=pool.device)[None].expand_as(which)
    found = read(pool, table, rows)
    residual.overwrite(found, part, index, which)
    write(pool, table, rows, found)


def stored(storage: Storage | InKeys, parts: list[Tensor], table: Tensor, slots: int) -> list[Tensor]:
    """The parts of the first `slots` slots at least: [B, Hkv, rows, ...], or as they are where their rows are fixed."""
    # Which parts a storage has, and how many tokens share a row, does not depend on the dim.
    own = storage.parts(128, torch.float32)

    def found(part: Tensor) -> Tensor:
        rows = residual.rows_of(storage, slots, table.shape[1] * part.shape[2])
        return read(part, table, torch.arange(rows, device=table.device)[None])

    return [part if of.fixed else found(part) for part, of in zip(parts, own, strict=True)]


def stored_at(storage: Storage | InKeys, parts: list[Tensor], table: Tensor, slots: Tensor) -> list[Tensor]:
    """The parts at `slots` [B, N], whose tokens share no rows: [B, Hkv, N, ...], or as they are where their rows are
    fixed."""
    own = storage.parts(128, torch.float32)
    return [
        part if of.fixed else read(part, table, slots.clamp(max=table.shape[1] * part.shape[2] - 1))
        for part, of in zip(parts, own, strict=True)
    ]


def _index(pool: Tensor, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pages, rows in them and heads, to index [B, Hkv, N] at once."""
    page, row = located(table, rows, pool.shape[2])
    head = torch.arange(pool.shape[1], device=pool.device)
    return page[:, None], row[:, None], head[None, :, None]
