"""Finds what the reference asks a retention in a step (`hooks.py`), by the kind of the retention."""

from __future__ import annotations

from typing import Any

from kvcompile.kernels.reference.retention.by_position import ByPosition
from kvcompile.kernels.reference.retention.by_score import ByScore
from kvcompile.kernels.reference.retention.hooks import Hooks
from kvcompile.kernels.reference.retention.in_cache import InCache
from kvcompile.layouts import Retention, Scored

# The hooks of a retention by scores, by its kind; those of all others follow from what its layout says.
RETAINED: dict[str, type[Hooks[Any]]] = {Scored.kind: ByScore}


def retained(retention: Retention) -> Hooks[Any]:
    """The hooks of a retention.

    Raises:
        KeyError: attention decides which tokens stay, and nothing here says how.
    """
    if retention.by_score:
        return RETAINED[retention.kind](retention)
    return (InCache if retention.in_cache else ByPosition)(retention)
