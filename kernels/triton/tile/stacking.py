"""Rows of a step's products: where channels have scales by groups, each query head is a row once for each group.

    row = place of the group * BLOCK_M + head        q[row, c] = q[head, c] if c is in the group, else 0

A product has 16 rows at least, and the query heads of a KV head are few: rows that would be padding do what else took
a product, and a set of weights, for each group of channels.

    s[head] = sum over groups of  (q[row] k) * scale[group] + sum(q[row]) * minimum[group]
    w[row]  = p[head] * scale[group]    acc[row] = sum w[row] v, of which the channels of the group are taken

Of a side with fewer groups than the other, one row in several has the group, and the others nothing (keys) or the same
(values).

The place of a group is its number with the bits in reverse: of scores, a thread has a row and the eighth after
it, which are then those of two groups next to each other, whose numbers one load brings from shared memory.
"""

from __future__ import annotations

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.tile import group_numbers
from kvcompile.kernels.triton.tile.channel_blocks import SMALLEST
from kvcompile.layouts import InKeys, Storage

MOST = 16  # groups: with more, even one head would be more rows than a product needs
_ROWS = 16  # of a product, at least


def groups(storage: Storage | InKeys, dim: int) -> int:
    """Groups of channels of a vector that have a scale of their own."""
    if isinstance(storage, InKeys) or storage.of_slots.scale.per != "group":
        return 1
    return storage.of_slots.groups(dim)


def stacks(role: str, site: SiteSpec, head_dim: int, v_head_dim: int, heads: int, dtype: torch.dtype) -> int:
    """How often a query head is a row; 1: once, as of many queries, whose rows are no padding.

    heads: of queries, to a KV head; dtype: the model's
    """
    if filled(role, site, head_dim, v_head_dim, heads, dtype):
        return 1
    often = _stacks(role, site, head_dim, v_head_dim)
    sides = ((site.layout.keys, head_dim), (site.layout.values, v_head_dim))
    # Sets for nobody are no work of rows that would be padding anyway.
    padded = any(groups(storage, dim) & (groups(storage, dim) - 1) for storage, dim in sides)
    return 1 if padded and heads * often > _ROWS else often


def filled(role: str, site: SiteSpec, head_dim: int, v_head_dim: int, heads: int, dtype: torch.dtype) -> bool:
    """Whether the query heads of a step leave no rows for groups of channels, and codes can take the scales of these.

    In more rows than a product needs, every warp would have all of the values, or the values would go through shared
    memory once more: of 8 heads and 4 groups three times as many instructions, and what spills.
    """
    if heads * _stacks(role, site, head_dim, v_head_dim) <= _ROWS:
        return False
    sides = ((site.layout.keys, head_dim), (site.layout.values, v_head_dim))
    return all(
        takes_scales(storage.of_slots, dim, dtype, role == "decode")
        for storage, dim in sides
        if isinstance(storage, Storage) and groups(storage, dim) > 1
    )


def _stacks(role: str, site: SiteSpec, head_dim: int, v_head_dim: int) -> int:
    layout = site.layout
    turns = layout.rotates_on_read and site.rotary is not None
    if role != "decode" or layout.in_keys or turns:
        return 1
    counts = (_sets(layout.keys, head_dim), _sets(layout.values, v_head_dim))
    return max(counts) if max(counts) <= MOST else 1


def _sets(storage: Storage | InKeys, dim: int) -> int:
    """Sets of rows that groups of channels take: a power of two."""
    if isinstance(storage, InKeys) or groups(storage, dim) == 1:
        return 1
    return group_numbers.columns(storage.of_slots, dim)


def takes_scales(kept: Storage, dim: int, dtype: torch.dtype, step: bool) -> bool:
    """Whether codes can become code * scale + minimum in float16, with numbers for each group of channels.

    step: of a step, those of 2 bits as well
    """
    element, count = kept.element, kept.groups(dim)
    if kept.scale.per != "group" or count == 1 or dtype == torch.float32:
        return False
    bits = (2, 4, 8) if step else (4, 8)
    plain = element.kind == "uint" and element.bits in bits and kept.scale.dtype == "float16"
    return plain and dim & (dim - 1) == 0 and dim * element.bits // 8 >= 2 * SMALLEST and dim // count >= 4


def repeated(name: str, often: int, rows: int, columns: int | None = None) -> str:
    """An expression: a block [rows] or [rows, columns] with all of its rows `often` times, one set behind the other."""
    if often == 1:
        return name
    if columns is None:
        return f"tl.reshape(tl.broadcast_to({name}[None, :], [{often}, {rows}]), [{often * rows}])"
    whole = f"tl.broadcast_to({name}[None, :, :], [{often}, {rows}, {columns}])"
    return f"tl.reshape({whole}, [{often * rows}, {columns}])"


def spread(name: str, count: int, rows: int, columns: int) -> str:
    """An expression: numbers [columns, count] of groups as [rows, columns], a set of rows at the place of each."""
    each, bits = rows // count, count.bit_length() - 1
    turned = f"tl.trans({name})"
    if bits > 1:
        sizes, axes = ", ".join(["2"] * bits), ", ".join(str(axis) for axis in range(bits, -1, -1))
        turned = f"tl.permute(tl.reshape({name}, [{columns}, {sizes}]), [{axes}])"
        turned = f"tl.reshape({turned}, [{count}, {columns}])"
    whole = f"tl.broadcast_to({turned}[:, None, :], [{count}, {each}, {columns}])"
    return f"tl.reshape({whole}, [{rows}, {columns}])"


def summed(name: str, often: int, rows: int, columns: int) -> str:
    """An expression: the sum of the `often` rows of each of `rows` heads."""
    return f"tl.sum(tl.reshape({name}, [{often}, {rows}, {columns}]), 0)"


def own(channels: str, count: int, width: int, often: int) -> str:
    """An expression: which channels [1, W] are of a set of rows, bool [often, 1, W]."""
    sets = f"tl.arange(0, {often})[:, None, None]"
    if count == 1:
        return f"({sets} == tl.zeros_like({channels})[None, :, :])"
    times = often // count
    group = f"({channels} // {width})"
    bits = count.bit_length() - 1
    if bits > 1:
        moved = [f"(({group} >> {bit} & 1) << {bits - 1 - bit})" for bit in range(bits)]
        group = f"({' | '.join(moved)})"
    group += f" * {times}" if times > 1 else ""
    return f"({sets} == ({group})[None, :, :])"
