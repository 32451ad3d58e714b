"""Placement: at which slot of the layer's array a token lives, as a sympy expression of its position.

| placement | slot of the token at `pos` | slots |
|---|---|---|
| Contiguous | pos | the limit of tokens |
| Ring | pos below `sinks`, else sinks + (pos - sinks) mod window | sinks + window |
| Slots | pos below the budget, else the slot `given_up` by the lowest score | the budget |

Eviction never compacts: in a ring the new token overwrites the slot of the token that leaves the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import sympy

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.retention import Retention, Scored


@dataclass(frozen=True)
class Contiguous:
    """Slots in the order of positions. With a bounded retention, forgotten tokens keep their memory."""

    kind: Literal["contiguous"] = "contiguous"

    def num_slots(self, retention: Retention) -> sympy.Expr:
        return sy.T

    def address(self, retention: Retention) -> sympy.Expr:
        return sy.pos

    def token_at(self, retention: Retention) -> sympy.Expr:
        return sy.slot

    def check(self, retention: Retention) -> str | None:
        if isinstance(retention, Scored):
            return (
                f"a contiguous placement keeps the memory of the tokens that {retention.method} forgets: use placement "
                "'slots'"
            )
        return None

    def __str__(self) -> str:
        return "contiguous"


@dataclass(frozen=True)
class Ring:
    """As many slots as the retention keeps; the window part is reused round and round."""

    kind: Literal["ring"] = "ring"

    def num_slots(self, retention: Retention) -> sympy.Expr:
        return retention.budget()

    def address(self, retention: Retention) -> sympy.Expr:
        window = retention.window
        assert window is not None, "check() refuses a ring without a window"
        ring = retention.sinks + sympy.Mod(sy.pos - retention.sinks, window)
        return (
            ring if not retention.sinks else sympy.Piecewise((sy.pos, sy.pos < retention.sinks), (ring, True))
        )

    def token_at(self, retention: Retention) -> sympy.Expr:
        # The newest position below `length` that address() maps to `slot`; below `sinks` (or negative)
        # where the slot has not been written yet.
        window, sinks = retention.window, retention.sinks
        assert window is not None, "check() refuses a ring without a window"
        last = sy.length - 1
        ring = last - sympy.Mod(last - sy.slot, window)
        return ring if not sinks else sympy.Piecewise((sy.slot, sy.slot < sinks), (ring, True))

    def check(self, retention: Retention) -> str | None:
        if isinstance(retention, Scored):
            return (
                f"a ring overwrites its oldest tokens, where {retention.method} says which one goes: use placement "
                "'slots'"
            )
        if retention.window is None:
            return (
                "a ring overwrites its oldest tokens, which retention 'full' must keep: "
                "use placement 'contiguous', or a retention with a window"
            )
        return None

    def __str__(self) -> str:
        return "ring"


@dataclass(frozen=True)
class Slots:
    """As many slots as the retention keeps, in no order: each knows its token, and a score says which one goes."""

    kind: Literal["slots"] = "slots"

    def num_slots(self, retention: Retention) -> sympy.Expr:
        return retention.budget()

    def address(self, retention: Retention) -> sympy.Expr:
        return sympy.Piecewise((sy.pos, sy.pos < retention.budget()), (sy.given_up, True))

    def token_at(self, retention: Retention) -> sympy.Expr:
        return sy.held

    def check(self, retention: Retention) -> str | None:
        if not isinstance(retention, Scored):
            return (
                f"slots in any order need a score per token, which retention {retention.kind!r} has not: use placement "
                + ("'contiguous'" if retention.window is None else "'ring'")
            )
        return None

    def __str__(self) -> str:
        return "slots"


Placement = Contiguous | Ring | Slots
PLACEMENTS: tuple[type[Placement], ...] = (Contiguous, Ring, Slots)


def placement_from(data: dict[str, Any]) -> Placement:
    """Rebuild a placement from `dataclasses.asdict`."""
    return next(cls for cls in PLACEMENTS if cls.kind == data["kind"])(**data)
