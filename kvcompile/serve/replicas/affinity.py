"""Which replica a prompt goes to: one that has its beginning in the prefix cache, unless that one has too much to do.

Two rules, in this order:

1. The replica that the longest known beginning of this prompt last went to.
2. Rendezvous hashing of its first piece: every router comes to the same order of replicas without asking another, and
   where a replica comes or goes, only that one's prompts move.

Neither holds a replica that is busier than its share of the load allows: the next one in the order is taken. Without a
bound, everything that begins with one system prompt would be one replica's.

Sources: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates" (rendezvous hashing); Mirrokni
et al. 2018, "Consistent hashing with bounded loads".
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvcompile.serve.prefix import Chain, root

PIECE = 64  # tokens between two places where prompts are said to begin alike
_PIECES = 64  # of one prompt that are looked at


def beginnings(ids: Sequence[int], salt: str) -> tuple[str, ...]:
    """Names of a prompt's beginnings, the shortest first: equal where tokens and salt are; none where it is short."""
    pieces = min(len(ids) // PIECE, _PIECES)
    keys = Chain(root("kvcompile affinity 1", salt), PIECE).upto(ids, pieces)
    return tuple(key.hex()[:32] for key in keys)


def by_rank(name: str, replicas: Iterable[str]) -> list[str]:
    """All replicas, the one that the name belongs to first."""
    return sorted(
        replicas, key=lambda replica: hashlib.sha256(f"{name}\0{replica}".encode()).digest(), reverse=True
    )


def bound(loads: Mapping[str, int], factor: float, slack: int) -> int:
    """Requests that a replica may have once one more is there: `factor` times the mean, and never less than `slack`."""
    return max(slack, math.ceil(factor * (sum(loads.values()) + 1) / max(len(loads), 1)))


class Places:
    """Where beginnings last went; those that were not asked for longest are forgotten."""

    def __init__(self, most: int = 1 << 16):
        self._most = most
        self._of: OrderedDict[str, str] = OrderedDict()

    def note(self, names: Sequence[str], replica: str) -> None:
        """A prompt with these beginnings went to a replica."""
        for name in names:
            self._of[name] = replica
            self._of.move_to_end(name)
        while len(self._of) > self._most:
            self._of.popitem(last=False)

    def order(self, names: Sequence[str], loads: Mapping[str, int], factor: float, slack: int) -> list[str]:
        """The replicas in the order in which they should be asked.

        Args:
            names: of the prompt's beginnings, the shortest first; none: the idlest replica comes first.
            loads: requests that each replica has now.
        """
        idlest = sorted(loads, key=lambda replica: loads[replica])
        if not names:
            return idlest
        known = next((self._of[name] for name in reversed(names) if self._of.get(name) in loads), None)
        wanted = by_rank(names[0], loads)
        if known is not None:
            wanted.remove(known)
            wanted.insert(0, known)
        most = bound(loads, factor, slack)
        free = [replica for replica in wanted if loads[replica] < most]
        return [*free, *(replica for replica in idlest if replica not in free)]
