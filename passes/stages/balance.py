"""Balance: of all ways to put segments in a row into stages, the one whose largest stage has least.

    cost(i, j)  = bytes of the weights that segments i .. j - 1 read, each once, and of their caches
    best(k, j)  = min over i of max(best(k - 1, i), cost(i, j))

Of equals the one with fewest bytes in all, so that what several stages would compute again stays in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    count = len(segments)
    cost = _costs(segments, sizes)
    # By stages so far: of each end the largest, the sum, and where the stages before the last begin.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for number in range(stages):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (most, total, starts) in best.items():
            for end in range(start + 1, count + 1):
                own = cost[start].get(end)
                if own is None:
                    continue
                found = (max(most, own), total + own, starts if number == 0 else (*starts, start))
                if end not in longer or found < longer[end]:
                    longer[end] = found
        best = longer
    return best[count][2] if count in best else None


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
