"""Cuts: which indices of a dimension each rank has.

The invariant of every node of a rank's graph: with a placement P (one entry for each dimension), the node's value on
rank r is the whole graph's value, and of each dimension d with P[d] not None only the indices P[d].indices(r), in that
order. Nothing else is ever claimed of a value, and every rule (`forms/`) is a statement about this invariant alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cut:
    """A dimension of `size` over ranks: of each rank the runs [start, stop) of indices that it has, in order."""

    size: int
    ranks: tuple[Runs, ...]

    def indices(self, rank: int) -> Indices:
        """The indices of one rank, int64, in the order in which it has them."""
        return _indices(self.ranks[rank])

    def count(self, rank: int) -> int:
        """How many indices a rank has."""
        return sum(stop - start for start, stop in self.ranks[rank])

    @property
    def counts(self) -> tuple[int, ...]:
        """How many indices each rank has."""
        return tuple(self.count(rank) for rank in range(len(self.ranks)))

    @property
    def exact(self) -> bool:
        """Whether every index is on one rank and no more: what is summed over it, is summed once."""
        found = np.concatenate([self.indices(rank) for rank in range(len(self.ranks))])
        return len(found) == self.size and len(np.unique(found)) == self.size

    def __str__(self) -> str:
        return f"{self.counts[0]} of {self.size}"


Placement = tuple[Cut | None, ...]


@lru_cache(maxsize=4096)
def _indices(runs: Runs) -> Indices:
    parts = [np.arange(start, stop, dtype=np.int64) for start, stop in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def cut_of(size: int, ranks: Sequence[Indices]) -> Cut | None:
    """The cut in which each rank has these indices; None where every rank has all of them, in order."""
    if all(len(own) == size and bool((own == np.arange(size)).all()) for own in ranks):
        return None
    return Cut(size, tuple(map(_runs, ranks)))


def _runs(own: Indices) -> Runs:
    if not len(own):
        return ()
    breaks = np.flatnonzero(np.diff(own) != 1) + 1
    starts = own[np.concatenate([[0], breaks])]
    stops = own[np.concatenate([breaks - 1, [len(own) - 1]])] + 1
    return tuple((int(a), int(b)) for a, b in zip(starts, stops, strict=True))


def blocks(size: int, ranks: int, unit: int = 1) -> Cut | None:
    """`size` in one run for each rank, as even as can be, each of whole units; None for one rank."""
    edges = [size // unit * rank // ranks * unit for rank in range(ranks)] + [size]
    return cut_of(size, [np.arange(a, b) for a, b in pairwise(edges)])


def covering(size: int, ranks: int) -> Cut | None:
    """`size` in runs of one length, the last of which may begin in the one before: equal parts without padding."""
    length = -(-size // ranks)
    starts = [min(rank * length, size - length) for rank in range(ranks)]
    return cut_of(size, [np.arange(start, start + length) for start in starts])


def repeated(size: int, ranks: int) -> Cut | None:
    """One of `size` for each rank, each of them on ranks / size neighbours."""
    assert ranks % size == 0, f"{size} on {ranks} ranks"
    return cut_of(size, [np.array([rank * size // ranks]) for rank in range(ranks)])


def whole(rank: int) -> Placement:
    """The placement of a tensor of so many dimensions that every rank has all of."""
    return (None,) * rank


def together(placement: Placement) -> Cut | None:
    """All cut dimensions as one, row-major; None: there is none."""
    cuts = [cut for cut in placement if cut is not None]
    if len(cuts) < 2:
        return cuts[0] if cuts else None
    sizes = [cut.size for cut in cuts]
    ranks = [
        np.ravel_multi_index(np.ix_(*(cut.indices(rank) for cut in cuts)), sizes).reshape(-1)
        for rank in range(len(cuts[0].ranks))
    ]
    return cut_of(int(np.prod(sizes)), ranks)


def covers(placement: Placement) -> bool:
    """Whether the ranks have all of it between them: two dimensions that are cut over the same ranks may not."""
    cut = together(placement)
    if cut is None:
        return True
    found = np.concatenate([cut.indices(rank) for rank in range(len(cut.ranks))])
    return len(np.unique(found)) == cut.size


def is_whole(placement: Placement) -> bool:
    """Whether every rank has all of it."""
    return all(cut is None for cut in placement)


def local_shape(shape: Sequence[object], placement: Placement, rank: int) -> list[object]:
    """The sizes that a rank has."""
    return [size if cut is None else cut.count(rank) for size, cut in zip(shape, placement, strict=True)]
