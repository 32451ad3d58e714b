"""Finds what a step of generated kernels asks a retention (`hooks.py`), by the kind of the retention."""

from __future__ import annotations

from kvcompile.kernels.triton.host.retention.by_score import ByScore
from kvcompile.kernels.triton.host.retention.hooks import Hooks
from kvcompile.layouts import Retention, Scored

# The hooks of a retention by scores, by its kind; all others have those of one by positions.
RETAINED: dict[str, type[Hooks]] = {Scored.kind: ByScore}


def retained(retention: Retention) -> Hooks:
    """The hooks of a retention.

    Raises:
        KeyError: attention decides which tokens stay, and nothing here says how; `supports.py` refuses such a plan.
    """
    return RETAINED[retention.kind]() if retention.by_score else Hooks()
