"""How many texts and pages fit the memory that an engine is given, and what its scheduler goes by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from kvcompile.errors import LimitError
from kvcompile.layouts.buffer import BufferSpec
from kvcompile.layouts.pages import SPARE_PAGES, TABLE_BYTES, PageGroup, Released
from kvcompile.layouts.placement import Ring
from kvcompile.layouts.sharing import sharing
from kvcompile.plan import Plan
from kvcompile.runtime.cache_spec import CacheShape
from kvcompile.serve.pages import Group
from kvcompile.util.console import format_bytes

_OF_WINDOWS = 2  # times the pages of the texts that run: those of windows that prefixes are found by
_OF_FREE = {"cpu": 0.25, "cuda": 0.8}  # what an engine takes of the memory that is free, if it is not told


@dataclass(frozen=True)
class Capacity:
    """What an engine's cache has room for.

    rows:       texts at a time
    groups:     the pages of every group
    page_bytes: of a page of each group, over all its layers
    row_bytes:  of what a text has outside of pages
    """

    rows: int
    groups: tuple[Group, ...]
    page_bytes: tuple[int, ...]
    row_bytes: int

    @property
    def bytes(self) -> int:
        """Of all of it."""
        pools = sum(
            (g.pages + SPARE_PAGES) * each for g, each in zip(self.groups, self.page_bytes, strict=True)
        )
        return pools + self.rows * self.row_bytes


def capacity(
    plan: Plan, shape: CacheShape, device: torch.device, rows: int, memory: int | None, chunk: int
) -> Capacity:
    """Divide `memory` bytes: first a row for each text, then pages, equally many tokens in every group.

    Args:
        rows: texts at a time at most.
        memory: None: a share of what is free, and no more than `rows` texts of the longest could ever take.
        chunk: tokens of a text in one pass.

    Raises:
        LimitError: not one text of one chunk fits.
    """
    names = [name for pool in shape.pools for name in pool.buffers]
    row = sum(_nbytes(of.spec) for name, of in shape.buffers.items() if name not in names)
    row += sum(TABLE_BYTES * pool.group.pages_per_sequence for pool in shape.pools)
    pages = tuple(sum(_nbytes(shape.buffers[name].spec) for name in pool.buffers) for pool in shape.pools)
    given = memory is not None
    left = _free_for(shape, device) if memory is None else memory
    rows = min(rows, left // max(row, 1))
    kinds = [_Kind(pool.group, _released(plan, pool.group), chunk) for pool in shape.pools]
    counts = _counts(kinds, pages, rows, left - rows * row)
    # A few texts with pages are more use than many without.
    while rows > 1 and counts is not None and min(counts, default=1) < 1:
        rows //= 2
        counts = _counts(kinds, pages, rows, left - rows * row)
    if rows < 1 or counts is None or min(counts, default=1) < 1:
        least = row + sum((1 + SPARE_PAGES) * each for each in pages)
        raise LimitError(
            f"the engine's memory is {format_bytes(left)}{'' if given else ', a share of what is free'}, and one text "
            f"takes at least {format_bytes(least)}: give it more (memory=..), or choose a recipe that takes less"
        )
    groups = tuple(_group(plan, kind, count) for kind, count in zip(kinds, counts, strict=True))
    return Capacity(rows, groups, pages, row)


@dataclass(frozen=True)
class _Kind:
    """The pages of a group, and what of a text stays there; chunk: tokens of a text in one pass."""

    group: PageGroup
    released: Released | None
    chunk: int

    def most(self, rows: int) -> int:
        """Pages that `rows` texts of the longest can take, or what the recipe says.

        Where texts give back pages behind their windows, as many again are of use: prefixes are found on them.
        """
        if self.group.pages is not None:
            return self.group.pages
        each = self.group.pages_per_sequence
        if self.released is not None:
            each = min(each, _OF_WINDOWS * self.released.most(self.chunk, self.group.page_size))
        return rows * each

    def count(self, rows: int, tokens: int) -> int:
        """Pages of so many tokens, or what the recipe says."""
        most = self.most(rows)
        return most if self.group.pages is not None else min(most, tokens // self.group.page_size)


def _counts(kinds: Sequence[_Kind], each: Sequence[int], rows: int, left: int) -> list[int] | None:
    """Pages of every group: as many tokens in all as fit `left` bytes; None: not even page 0."""
    spare = sum(SPARE_PAGES * size for size in each)
    if left < spare:
        return None if kinds else []

    def counts(tokens: int) -> list[int]:
        return [kind.count(rows, tokens) for kind in kinds]

    def fits(tokens: int) -> bool:
        return sum(n * size for n, size in zip(counts(tokens), each, strict=True)) + spare <= left

    low, high = 0, max((kind.most(rows) * kind.group.page_size for kind in kinds), default=0)
    while low < high:
        middle = -(-(low + high) // 2)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return counts(low)


def _released(plan: Plan, group: PageGroup) -> Released | None:
    """What of a text stays in a group; None: all of it.

    A text that must keep what it has until it ends has its pages from the start: it gives none back on its way.
    """
    if not sharing(decision.layout for decision in plan.decisions).recomputes:
        return None
    return group.released


def _group(plan: Plan, kind: _Kind, pages: int) -> Group:
    group = kind.group
    layouts = [d.layout for d in plan.decisions if d.layer in group.layers]
    # Layers of equally many slots share pages, whatever they do with them.
    sinks = {layout.retention.sinks if isinstance(layout.logical, Ring) else None for layout in layouts}
    anywhere = len(sinks) > 1 or any(layout.retention.by_score for layout in layouts)
    newest = max(layout.unsettled for layout in layouts)
    ring = None if anywhere else sinks.pop()
    return Group(group.page_size, group.slots, pages, ring, anywhere, newest, kind.released)


def _nbytes(spec: BufferSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _free_for(shape: CacheShape, device: torch.device) -> int:
    """A share of what is free; of a model over several devices, the one whose layers take most of it decides."""
    sizes: dict[torch.device, int] = {}
    for name, of in shape.buffers.items():
        own = shape.device_of(name, device)
        sizes[own] = sizes.get(own, 0) + _nbytes(of.spec)
    return min(_free(own) * sum(sizes.values()) // size for own, size in sizes.items())


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _OF_FREE["cuda"])
    return int(psutil.virtual_memory().available * _OF_FREE["cpu"])
