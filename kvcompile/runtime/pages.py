"""Which sequence has which pages: the allocator of one group of layers (PagedAttention, Kwon et al. 2023, section 4.2).

A sequence of n tokens has ceil(n / page_size) pages, at most what its slots fill; it takes them when its tokens come
and gives them back on reset. Every page has one owner or is free. All of it is on the CPU: the tensors, and the
tables that kernels read, are `runtime/cache.py`'s.

A pool without a fixed number of pages grows to what is needed, and by half at least, so that a token is copied three
times in all at most; never beyond what all sequences of the batch can take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcompile.errors import LimitError
from kvcompile.layouts import PageGroup
from kvcompile.util.listed import listed

_TOLD = 8  # sequences that a message names

_GROWTH = 1.5


@dataclass(frozen=True)
class Moves:
    """What a new order of sequences does to pages.

    rows:   the pages of each sequence afterwards
    copies: (from, to): a sequence that was chosen twice gets pages of its own with the same contents
    free:   those of nobody afterwards
    more:   pages that the pool lacks for that
    """

    rows: tuple[tuple[int, ...], ...]
    copies: tuple[tuple[int, int], ...]
    free: tuple[int, ...]
    more: int


class PagePool:
    """The pages of one group: 1 .. `capacity`, each of one sequence or free. (Page 0 is nobody's.)"""

    def __init__(self, group: PageGroup):
        self.group = group
        self.capacity = 0
        self.rows: list[list[int]] = []
        self._free: list[int] = []  # the next to be taken is the last

    def copy(self) -> PagePool:
        """Another pool with the same pages of the same sequences."""
        made = PagePool(self.group)
        made.capacity, made._free = self.capacity, list(self._free)
        made.rows = [list(row) for row in self.rows]
        return made

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def clear(self, batch: int) -> None:
        """All pages are free, for `batch` sequences to come."""
        self._free = list(range(self.capacity, 0, -1))
        self.rows = [[] for _ in range(batch)]

    def release(self) -> None:
        """There are no pages any more."""
        self.capacity, self.rows, self._free = 0, [], []

    def lacking(self, lengths: Sequence[int]) -> int:
        """Pages that sequences of `lengths` tokens need beyond those that are free."""
        return max(0, sum(self._wanted(lengths)) - self.free)

    def check(self, lengths: Sequence[int], kept: bool = True) -> None:
        """Refuse sequences that would come to `lengths` tokens and more pages than the pool may have.

        kept: whether they are the sequences that have pages now; else others, for which all pages will be free.

        Raises:
            LimitError: a pool of a fixed size lacks pages; nothing has changed.
        """
        pages = self.group.pages
        if pages is None:
            return
        each = [self.group.pages_for(length) for length in lengths]
        wanted = self._wanted(lengths) if kept else each
        in_use = sum(map(len, self.rows)) if kept else 0
        if sum(wanted) <= pages - in_use:
            return
        needs = listed((f"sequence {i}: {n}" for i, n in enumerate(wanted) if n), _TOLD)
        taken = listed(
            (f"sequence {i}: {len(row)}" for i, row in enumerate(self.rows) if row and kept), _TOLD
        )
        size = self.group.page_size
        raise LimitError(
            f"out of pages: {pages - in_use} of the pool's {pages} pages (of {size} tokens) are free, and this needs "
            f"{sum(wanted)} more ({needs}); in use: {taken or 'none'}. Nothing was written. Pass fewer or shorter "
            f"sequences, call reset(), or set cache.placement.pages to at least {in_use + sum(wanted)} (without it "
            "the pool grows)"
        )

    def capacity_for(self, lacking: int) -> int:
        """The capacity that a pool should grow to that lacks so many pages."""
        if self.group.pages is not None:
            return self.group.pages
        most = max(len(self.rows) * self.group.pages_per_sequence, self.capacity + lacking)
        return min(most, max(self.capacity + lacking, int(self.capacity * _GROWTH)))

    def grow(self, capacity: int) -> None:
        """The pool has so many pages now."""
        self._free = [*range(capacity, self.capacity, -1), *self._free]
        self.capacity = capacity

    def extend(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Give sequences the pages that `lengths` tokens need; they must be free.

        Returns (sequence, pages it had before) of each that got some.
        """
        changed = []
        for number, (row, count) in enumerate(zip(self.rows, self._wanted(lengths), strict=True)):
            if count:
                changed.append((number, len(row)))
                row.extend(self._free.pop() for _ in range(count))
        return changed

    def trim(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Take back what sequences of `lengths` tokens do not need.

        Returns (sequence, pages it keeps) of each that lost some.
        """
        changed = []
        for number, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            keep = self.group.pages_for(length)
            if len(row) > keep:
                changed.append((number, keep))
                self._free.extend(reversed(row[keep:]))
                del row[keep:]
        return changed

    def moves(self, index: Sequence[int]) -> Moves:
        """What becomes of the pages when sequence i becomes what index[i] was; nothing changes yet.

        A sequence that stays in its place, or else the first that becomes it, takes over its pages as they are. The
        others get pages that are free or that nobody takes over, which are never among those that are copied from.
        """
        heir: dict[int, int] = {}
        for row, source in enumerate(index):
            if source not in heir or source == row:
                heir[source] = row
        orphans = [page for i, pages in enumerate(self.rows) if i not in heir for page in pages]
        spare = [*self._free, *orphans]
        rows: list[tuple[int, ...]] = []
        copies: list[tuple[int, int]] = []
        more = 0
        for row, source in enumerate(index):
            own = tuple(self.rows[source])
            if heir[source] != row:
                more += max(0, len(own) - len(spare))
                own = tuple(spare.pop() for _ in own[: len(spare)])
                copies += zip(self.rows[source], own, strict=False)
            rows.append(own)
        return Moves(tuple(rows), tuple(copies), tuple(spare), more)

    def move(self, moves: Moves) -> None:
        """Carry out `moves`, which must lack nothing."""
        self.rows, self._free = [list(row) for row in moves.rows], list(moves.free)

    def _wanted(self, lengths: Sequence[int]) -> list[int]:
        """How many more pages each sequence needs."""
        return [
            max(0, self.group.pages_for(length) - len(row))
            for length, row in zip(lengths, self.rows, strict=True)
        ]
