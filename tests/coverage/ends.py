"""Where texts end: at the original's last position, or where the rewritten model takes no more."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.coverage.compare import fed, recipe_for
from tests.coverage.original import ALIKE, Original, error, whole
from tests.coverage.settings import Setting
from tests.coverage.sizes import LONGEST


def limit(front: Any) -> int | None:
    """The longest text that the rewritten model may be asked for; None: one longer than is tried."""
    positions = front.detection.limit
    limits = [front.captured.max_seq_len, None if positions is None else positions.tokens]
    return min((tokens for tokens in limits if tokens is not None and tokens < LONGEST), default=None)


def problem(setting: Setting, front: Any, fast: Any, ids: Tensor, right: Original) -> str:
    """What is wrong with the rewritten model where a text goes on after the end; empty: nothing.

    fast: made for no more tokens than there are

    Only where a table is too short, and is not itself a weight, can it be said what comes after the original's end:
    what the original computes with a longer table. Elsewhere more tokens must be refused.
    """
    from kvcompile import api

    most = limit(front)
    end = min((each for each in (right.end, most) if each is not None), default=None)
    if end is None:
        return ""
    if most == end:
        return _goes_on(fast, front, ids, end)
    longer = setting.longer() if right.fails else None
    if longer is None:
        return f"{end + 1} tokens may be asked for, and the original computes {end}"
    fast = api.build(setting.model, front, recipe_for("baseline", front, LONGEST)[0])
    try:
        found = error(fed(fast, ids, [end, LONGEST - end]), whole(longer, ids))
    except Exception as failed:
        return f"it fails after {end} tokens, where the original ends: {type(failed).__name__}: {failed}"
    return (
        ""
        if found <= ALIKE
        else f"beyond the {end} tokens of the original it gives other logits ({found:.1e})"
    )


def _goes_on(fast: Any, front: Any, ids: Tensor, end: int) -> str:
    """What happens with a text of more tokens than the limit; nothing where both plan and model refuse it."""
    from kvcompile.errors import LimitError, PlanError
    from kvcompile.pipeline import plan_for

    try:
        plan_for(front, recipe_for("baseline", front, end + 1)[0])
        return f"{end + 1} tokens may be asked for, where it takes {end}"
    except PlanError:
        pass
    fed(fast, ids, [end])
    try:
        fast(ids[:, end : end + 1])
    except LimitError:
        return ""
    return f"it goes on after {end} tokens, which is all that it takes"
