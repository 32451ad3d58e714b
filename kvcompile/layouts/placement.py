"""Placement: at which slot of the layer's array a token lives, as a sympy expression of its position.

| placement | slot of the token at `pos` | slots |
|---|---|---|
| Contiguous | pos | the limit of tokens |
| Ring | pos below `sinks`, else sinks + (pos - sinks) mod window | sinks + window |
| Slots | pos below the budget, else the slot `given_up` by the lowest score | the budget |
| Paged | as Contiguous, as Ring where the retention has a window, as Slots where it goes by scores | the same |
| Paged, released | as Contiguous, under a window | the limit of tokens, of which those behind the window have no page |

Eviction never compacts: in a ring the new token overwrites the slot of the token that leaves the window.

Paged is a layer below: slots stay what they are, and a page table says where in a pool they stand (`pages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import sympy

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.pages import Released, check_page_size
from kvcompile.layouts.retention import Retention


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
        if retention.by_score:
            return (
                f"a contiguous placement keeps the memory of the tokens that {retention.name} forgets: use placement "
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
        if retention.by_score:
            return (
                f"a ring overwrites its oldest tokens, where {retention.name} says which one goes: use placement "
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
        if not retention.by_score:
            return (
                f"slots in any order need a score per token, which retention {retention.kind!r} has not: use placement "
                + ("'contiguous'" if retention.window is None else "'ring'")
            )
        return None

    def __str__(self) -> str:
        return "slots"


@dataclass(frozen=True)
class Paged:
    """Slots in pages of `page_size`, which sequences take from a pool when they need them (Kwon et al. 2023).

    pages:    what each layer's pool has for all sequences together; None: it grows
    released: whether the slots of a window stand in the order of tokens, so that pages behind it can be given back
    """

    page_size: int = 16
    pages: int | None = None
    kind: Literal["paged"] = "paged"
    released: bool = False

    def logical(self, retention: Retention) -> Contiguous | Ring | Slots:
        """What decides the slot: paging itself moves slots about, and their number and order stay."""
        if self.released:
            return Contiguous()
        own: tuple[Contiguous | Ring | Slots, ...] = (Contiguous(), Ring(), Slots())
        return next(placement for placement in own if placement.kind == retention.placement)

    def num_slots(self, retention: Retention) -> sympy.Expr:
        return self.logical(retention).num_slots(retention)

    def address(self, retention: Retention) -> sympy.Expr:
        return self.logical(retention).address(retention)

    def token_at(self, retention: Retention) -> sympy.Expr:
        return self.logical(retention).token_at(retention)

    def pages_per_sequence(self, retention: Retention) -> sympy.Expr:
        """Pages of one sequence, in T."""
        return sympy.ceiling(self.num_slots(retention) / sympy.Integer(self.page_size))

    def gives_back(self, retention: Retention) -> Released | None:
        """What of a sequence stays while pages behind its window are given back; None: none ever are."""
        if not self.released:
            return None
        assert retention.window is not None, "check() refuses released pages without a window"
        return Released(retention.sinks, retention.window)

    def check(self, retention: Retention) -> str | None:
        problem = check_page_size(self.page_size)
        if problem is None and self.released:
            if retention.by_score:
                return (
                    f"released gives back pages behind a window, and {retention.name} keeps tokens wherever they are: "
                    "leave out released"
                )
            if retention.window is None:
                return (
                    f"released gives back pages behind a window, which retention {retention.kind!r} has not: leave out "
                    "released, or use a retention with a window"
                )
            return None
        if problem is None and self.pages is not None and not retention.keeps_all:
            wanted = int(self.pages_per_sequence(retention))
            if wanted > self.pages:
                return (
                    f"one sequence of retention '{retention}' takes {wanted} pages of {self.page_size} tokens, and the "
                    f"pool has {self.pages}: set pages to at least {wanted}, or leave it out and the pool grows"
                )
        return problem

    def __str__(self) -> str:
        pages = "" if self.pages is None else f" x {self.pages}"
        return f"paged {self.page_size}{pages}{', released' if self.released else ''}"


Placement = Contiguous | Ring | Slots | Paged
PLACEMENTS: tuple[type[Placement], ...] = (Contiguous, Ring, Slots, Paged)


def placement_from(data: dict[str, Any]) -> Placement:
    """Rebuild a placement from `dataclasses.asdict`."""
    return next(cls for cls in PLACEMENTS if cls.kind == data["kind"])(**data)
