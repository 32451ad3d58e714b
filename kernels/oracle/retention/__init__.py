"""Finds what the oracle asks a retention in a step (`hooks.py`), by the kind of the retention."""

from __future__ import annotations

from typing import Any

from kvcompile.kernels.oracle.retention.by_position import ByPosition, InCache
from kvcompile.kernels.oracle.retention.by_score import ByScore
from kvcompile.kernels.oracle.retention.hooks import Hooks
from kvcompile.layouts import Retention, Scored

# The hooks of a retention by scores, by its kind; what those by positions keep is in `kernels/oracle/kept.py`.
RETAINED: dict[str, type[Hooks[Any]]] = {Scored.kind: ByScore}


def retained(retention: Retention) -> Hooks[Any]:
    """The hooks of a retention, with nothing kept.

    Raises:
        KeyError: attention decides which tokens stay, and nothing here says how.
    """
    if retention.by_score:
        return RETAINED[retention.kind](retention)
    return (InCache if retention.in_cache else ByPosition)(retention)
