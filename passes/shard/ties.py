"""Ties: how indices of an operand's dimensions become indices of a result's.

    Same     index i is index i
    Regroup  the row-major index over several dimensions is that over several others (reshape)
    Slice    index start + step * i is index i
    Repeat   index i // times is index i

Each carries a cut forwards (from operand to result) and backwards, or says that it cannot: then the operand, or the
result, is whole in these dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch.fx import Node

from kvcompile.passes.shard.cuts import Cut, Indices, Placement, cut_of

Cuts = tuple[Cut | None, ...]


@dataclass(frozen=True)
class Same:
    """One dimension that stays as it is."""

    def forward(self, cuts: Cuts) -> Cuts | None:
        return cuts

    def backward(self, cuts: Cuts) -> Cuts | None:
        return cuts


@dataclass(frozen=True)
class Regroup:
    """Dimensions of sizes `before` become those of sizes `after`, row-major."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def forward(self, cuts: Cuts) -> Cuts | None:
        return regrouped(self.before, cuts, self.after)

    def backward(self, cuts: Cuts) -> Cuts | None:
        return regrouped(self.after, cuts, self.before)


@dataclass(frozen=True)
class Slice:
    """Result index i is operand index start + step * i, of `size` the first `count`."""

    size: int
    start: int
    step: int
    count: int

    def places(self, own: Indices) -> tuple[Indices, Indices]:
        """Of the operand's indices that a rank has: the places of those in the slice, and their result index."""
        offset = own - self.start
        inside = (offset >= 0) & (offset % self.step == 0) & (offset // self.step < self.count)
        places = np.flatnonzero(inside)
        return places, offset[places] // self.step

    def forward(self, cuts: Cuts) -> Cuts | None:
        (cut,) = cuts
        if cut is None:
            return cuts
        found = []
        for rank in range(len(cut.ranks)):
            places, own = self.places(cut.indices(rank))
            if not len(places) or strided(places) is None:
                return None
            found.append(own)
        return (cut_of(self.count, found),)

    def backward(self, cuts: Cuts) -> Cuts | None:
        (cut,) = cuts
        if cut is None:
            return cuts
        ranks = range(len(cut.ranks))
        return (cut_of(self.size, [self.start + self.step * cut.indices(rank) for rank in ranks]),)


@dataclass(frozen=True)
class Repeat:
    """Each of `size` indices `times` times, one beside the other."""

    size: int
    times: int

    def forward(self, cuts: Cuts) -> Cuts | None:
        (cut,) = cuts
        if cut is None:
            return cuts
        ranks = [
            (cut.indices(rank)[:, None] * self.times + np.arange(self.times)).reshape(-1)
            for rank in range(len(cut.ranks))
        ]
        return (cut_of(self.size * self.times, ranks),)

    def backward(self, cuts: Cuts) -> Cuts | None:
        (cut,) = cuts
        if cut is None:
            return cuts
        found = [cut.indices(rank)[:: self.times] // self.times for rank in range(len(cut.ranks))]
        before = (cut_of(self.size, found),)
        return before if self.forward(before) == cuts else None


How = Same | Regroup | Slice | Repeat


@dataclass(frozen=True)
class Tie:
    """Dimensions `source` of an operand become dimensions `result` of the result."""

    operand: Node
    source: tuple[int, ...]
    result: tuple[int, ...]
    how: How = Same()

    def forward(self, placement: Placement) -> Cuts | None:
        """The result's cuts, where the operand has a placement; None: it has to be whole here."""
        return self.how.forward(tuple(placement[dim] for dim in self.source))

    def backward(self, placement: Placement) -> Cuts | None:
        """The operand's cuts, where the result shall have a placement; None: there are none."""
        return self.how.backward(tuple(placement[dim] for dim in self.result))


def strided(places: Indices) -> tuple[int, int, int] | None:
    """(start, stop, step) of places that a slice gives; None where none does."""
    if len(places) == 1:
        return int(places[0]), int(places[0]) + 1, 1
    steps = np.diff(places)
    if steps[0] < 1 or bool((steps != steps[0]).any()):
        return None
    return int(places[0]), int(places[-1]) + 1, int(steps[0])


@lru_cache(maxsize=4096)
def regrouped(before: tuple[int, ...], cuts: Cuts, after: tuple[int, ...]) -> Cuts | None:
    """The cuts of dimensions `after` that hold the same elements in the same order; None where there are none."""
    ranks = next((len(cut.ranks) for cut in cuts if cut is not None), 0)
    if not ranks:
        return (None,) * len(after)
    places = np.arange(int(np.prod(before, dtype=np.int64))).reshape(before)
    found: list[list[Indices]] = [[] for _ in after]
    for rank in range(ranks):
        own = [
            np.arange(n) if cut is None else cut.indices(rank) for n, cut in zip(before, cuts, strict=True)
        ]
        flat = places[np.ix_(*own)].reshape(-1)
        if not len(flat):
            return None
        parts = [_first_seen(index) for index in np.unravel_index(flat, after)] if after else []
        again = np.ravel_multi_index(np.ix_(*parts), after).reshape(-1) if after else flat
        if len(again) != len(flat) or bool((again != flat).any()):
            return None
        for dim, part in enumerate(parts):
            found[dim].append(part)
    return tuple(cut_of(size, own) for size, own in zip(after, found, strict=True))


def _first_seen(index: Indices) -> Indices:
    _, first = np.unique(index, return_index=True)
    return index[np.sort(first)]


def along(operand: Node, pairs: Sequence[tuple[int, int]]) -> tuple[Tie, ...]:
    """Ties of dimensions that stay as they are: (of the operand, of the result)."""
    return tuple(Tie(operand, (source,), (result,)) for source, result in pairs)
