"""Names in a message: the first of them, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[object], most: int) -> str:
    """At most so many of them: "a, b and 3 others"."""
    found = [str(name) for name in names]
    left = len(found) - most
    more = f" and {left} other{'s' if left > 1 else ''}" if left > 0 else ""
    return ", ".join(found[:most]) + more
