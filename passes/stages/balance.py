"""Balance: of all ways to put segments in a row into stages, the one whose largest stage has least.

    cost(i, j)  = bytes of the weights that segments i .. j - 1 read, each once, and of their caches
    best(k, j)  = min over i of max(best(k - 1, i), cost(i, j))

Of equals the one with fewest bytes in all, so that what several stages would compute again stays in one: a second
search, for sums, among stages that are no larger.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """What lies between two places to cut.

    weights: names of the weights that it reads; cache: bytes of its caches and states; work: attention blocks and
    modules that run as Python
    """

    weights: frozenset[str]
    cache: int
    work: int


def balanced(segments: Sequence[Segment], sizes: Mapping[str, int], stages: int) -> tuple[int, ...] | None:
    """The number of the first segment of each stage but the first; None where there is no such way.

    sizes: bytes of each weight; every stage has some work.
    """
    cost = _costs(segments, sizes)
    found = _best(cost, stages, max, None)
    # The way to the smallest largest stage may have more bytes in all than another way to the same.
    best = None if found is None else _best(cost, stages, operator.add, found[0])
    return None if best is None else best[1]


def _best(
    cost: Sequence[Mapping[int, int]], stages: int, joined: Callable[[int, int], int], most: int | None
) -> tuple[int, tuple[int, ...]] | None:
    """The least that `joined` makes of the stages' bytes, and the number of the first segment of each but the first.

    most: bytes of a stage at most
    """
    # By end of the stages so far: what they come to, and where those but the first begin.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for number in range(stages):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (known, starts) in best.items():
            for end, own in cost[start].items() if start < len(cost) else ():
                if most is not None and own > most:
                    continue
                found = (joined(known, own), starts if number == 0 else (*starts, start))
                if end not in longer or found < longer[end]:
                    longer[end] = found
        best = longer
    return best.get(len(cost))


def _costs(segments: Sequence[Segment], sizes: Mapping[str, int]) -> list[dict[int, int]]:
    """By first segment and end the bytes of a stage; without those that have no work."""
    found: list[dict[int, int]] = []
    for start in range(len(segments)):
        own: dict[int, int] = {}
        there: set[str] = set()
        cost = work = 0
        for end in range(start, len(segments)):
            segment = segments[end]
            cost += segment.cache + sum(sizes[name] for name in segment.weights - there)
            there |= segment.weights
            work += segment.work
            if work:
                own[end + 1] = cost
        found.append(own)
    return found
