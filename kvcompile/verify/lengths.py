"""How long the verified texts are, and in which pieces they come: planned from the constants that a length can meet.

A mask, a bias or a layout changes where a position, a distance or a length passes one of its constants. A run that
is to tell whether it is right has tokens on both sides of each, and the tokens next to it come alone:

    constant 300:   ... 298 | 299 | 300 | 301 ...      positions 299 and 300 are passes of one token

The first run has at least `MINIMUM` tokens. As many runs follow as the budget has: the first of them reaches the
farthest constant within it, if the first run did not; the next ones step singly over what those before crossed within
a larger piece, and end a few tokens after it. Constants are told where no run reaches them, unless no text of the plan
does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MINIMUM = 400  # tokens of a run, where the limits allow it
FARTHEST = 4096  # the largest constant that a run is made longer for
BEYOND = 9  # tokens after the farthest constant
_NEAR = 1.2  # a run this much longer than the minimum is not worth another one
_SEEN = 16  # constants up to here, every short run steps over
_LAST = 7  # tokens of the last piece
_FIRST, _SECOND = 0.15, 0.55  # of the tokens: where the first and the second piece end


@dataclass(frozen=True)
class Constant:
    """A number that a position, a distance or a length may be compared with.

    where: what it was found in
    rank:  0 of what positions enter, 1 of the plan, 2 of anything else
    """

    value: int
    where: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.value:,} ({self.where})"


@dataclass(frozen=True)
class Budget:
    """tokens: of one run at most; passes: of one run at most, beside those that `prefill_chunk` makes; least: tokens of
    a run that no constant makes longer."""

    tokens: int = MINIMUM
    passes: int = 9
    runs: int = 1
    least: int = MINIMUM


@dataclass(frozen=True)
class Schedule:
    """Runs, each as the sizes of its pieces, the most telling first; and the constants that none of them crosses."""

    runs: tuple[tuple[int, ...], ...]
    missed: tuple[Constant, ...]


def schedule(constants: Sequence[Constant], limit: int | None, chunk: int | None, budget: Budget) -> Schedule:
    """What to run.

    Args:
        limit: tokens of a text at most; None: no limit.
        chunk: tokens of a piece at most; None: a prompt comes whole.
    """
    least = budget.least
    most = max(budget.tokens, least)
    most = most if limit is None else min(limit, most)
    ordered = _ordered(constants)
    missed = tuple(c for c in ordered if c.value >= most and (limit is None or c.value < limit))
    far = max((c.value for c in ordered if c.value < min(most, FARTHEST + 1)), default=0)
    longest = min(most, max(least, far + BEYOND))
    first = longest if longest <= _NEAR * least else min(least, most)
    totals = [first] if first == longest else [first, longest]
    edges = [c.value for c in (*ordered, *_twice(ordered))]
    left = [edge for edge in dict.fromkeys(edges) if edge > _SEEN]
    runs: list[tuple[int, ...]] = []
    while len(runs) < budget.runs:
        total = totals[min(len(runs), len(totals) - 1)]
        if len(runs) >= len(totals) and not any(edge < total for edge in left):
            break
        if len(runs) < len(totals):
            sizes, left = _cut(total, left, budget.passes, _bounds(total, len(runs)))
        else:
            sizes, left = _cut(total, left, budget.passes, set())
            if len(sizes) > 1:  # nothing is new after what it steps over
                sizes[-1] = min(sizes[-1], BEYOND)
        runs.append(_within(sizes, chunk))
    return Schedule(tuple(dict.fromkeys(runs)), missed)


def _ordered(constants: Sequence[Constant]) -> list[Constant]:
    """Each value once, the most telling first: by rank; what every short run steps over last; the farther first."""
    best: dict[int, Constant] = {}
    for constant in constants:
        known = best.get(constant.value)
        if constant.value > 0 and (known is None or constant.rank < known.rank):
            best[constant.value] = constant
    return sorted(best.values(), key=lambda c: (c.value <= _SEEN, c.rank, -c.value))


def _twice(constants: Sequence[Constant]) -> list[Constant]:
    """Twice of what repeats: the second page, group or block begins there. Numbers that no position enters count no
    tokens, and channels in halves most often."""
    return [replace(c, value=2 * c.value) for c in constants if c.value > 1 and c.rank < 2]


def _bounds(total: int, number: int) -> set[int]:
    """Where a run of `total` tokens is cut besides its edges.

    Two odd pieces come first; near the end, two tokens come alone and then a short piece: nothing else starts as late.
    number: of the run; these cuts differ from run to run.
    """
    parts = [int(total * part) + 2 * number | 1 for part in (_FIRST, _SECOND)]
    late = [total - _LAST - back for back in (2, 1, 0)]
    return {bound for bound in (*parts, *late) if 0 < bound < total}


def _cut(
    total: int, edges: Sequence[int], passes: int, bounds: Collection[int]
) -> tuple[list[int], list[int]]:
    """Sizes that sum to `total`, cut at `bounds` and with single tokens on both sides of the first of `edges`; and the
    edges that are left."""
    cuts = {0, total, *bounds}
    left = []
    for edge in edges:
        wanted = cuts | {edge - 1, edge, edge + 1}
        if edge < total and len(wanted) - 1 <= passes:
            cuts = wanted
        else:
            left.append(edge)
    ordered = sorted(cuts)
    return [after - before for before, after in pairwise(ordered)], left


def _within(sizes: Sequence[int], chunk: int | None) -> tuple[int, ...]:
    """The sizes, none larger than `chunk`."""
    if chunk is None:
        return tuple(sizes)
    return tuple(min(chunk, size - start) for size in sizes for start in range(0, size, chunk))
