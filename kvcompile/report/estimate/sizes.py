"""The bytes of a plan, and what a memory budget holds.

total(B, T) = sum over layers of CacheLayout.bytes    one sympy expression, which grows with B and with T
tokens    = the largest T with total(B = batch, T) <= memory
sequences = the largest B with total(B, T = tokens) <= memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from kvcompile.report.estimate.record import Fit, LayerCost
from kvcompile.util.console import MOST_BYTES

if TYPE_CHECKING:
    import sympy

    from kvcompile.layouts import CacheLayout
    from kvcompile.original.model_config import ModelShape
    from kvcompile.plan import Decision, Plan

_WHOLE_GROUPS = 128  # tokens: a multiple of every group that shares its scales


def costs(plan: Plan, shape: ModelShape, tokens: int) -> tuple[LayerCost, ...]:
    """Layers of the same kind together, in the order of their first."""
    from kvcompile.layouts import symbols as sy
    from kvcompile.specs import SiteShape

    itemsize = plan.torch_dtype.itemsize
    groups: dict[LayerCost, list[int]] = {}
    for decision, layer in zip(plan.decisions, shape.layers, strict=True):
        shared = layer.kv_source != layer.layer
        size = decision.subs(decision.bytes, itemsize).subs({sy.B: 1, sy.T: tokens})
        cost = LayerCost(
            layers=(),
            shape=SiteShape(**{of.name: getattr(decision, of.name) for of in fields(SiteShape)}),
            layout=decision.layout,
            latent=decision.latent,
            shared=shared,
            bytes_per_token=0 if shared else decision.bytes_per_token(itemsize),
            bytes_per_sequence=0 if shared else int(size),
        )
        groups.setdefault(cost, []).append(layer.layer)
    return tuple(replace(cost, layers=tuple(numbers)) for cost, numbers in groups.items())


def total(plan: Plan, shape: ModelShape, full: bool = False, tables: bool = True) -> sympy.Expr:
    """Bytes of all layers, states and page tables (unless not `tables`) in B and T; `full`: K and V in the model's
    dtype, every token kept."""
    import sympy

    from kvcompile.layouts import symbols as sy

    itemsize = plan.torch_dtype.itemsize
    terms = [
        decision.subs((_full(decision) if full else decision.layout).bytes, itemsize)
        for decision, layer in zip(plan.decisions, shape.layers, strict=True)
        if layer.kv_source == layer.layer
    ]
    return sympy.Add(*terms, sy.B * plan.state_bytes, plan.table_bytes if tables and not full else 0)


def _full(decision: Decision) -> CacheLayout:
    """The layout that keeps everything as the model computes it."""
    from kvcompile.layouts import CacheLayout

    layout = decision.layout
    return CacheLayout(values=layout.values) if layout.in_keys else CacheLayout()


def at(total: sympy.Expr, batch: int, tokens: int) -> int:
    from kvcompile.layouts import symbols as sy

    return int(total.subs({sy.B: batch, sy.T: tokens}))


def slope(plan: Plan, total: sympy.Expr) -> int:
    """Bytes that one more token of one sequence takes, rounded up: on average, where tokens come in groups or pages."""
    whole = math.lcm(_WHOLE_GROUPS, *(group.page_size for group in plan.page_groups))
    budgets = [decision.layout.slots(None) for decision in plan.decisions if decision.layout.bounded]
    full = 1 + -(-max(budgets, default=0) // whole) * whole
    return -(-(at(total, 1, full + whole) - at(total, 1, full)) // whole)


@dataclass(frozen=True)
class Room:
    """What a pool with a given number of pages holds.

    sequences: of the estimate's tokens
    tokens:    of each of the estimate's sequences; None: any number
    """

    placement: str
    pages: int
    sequences: int
    tokens: int | None


def pools(plan: Plan, batch: int, tokens: int) -> list[Room]:
    """Of each kind of pool whose pages are given."""
    from kvcompile.layouts import Paged

    found = {}
    for decision in plan.decisions:
        placement = decision.layout.placement
        if not decision.owns or not isinstance(placement, Paged) or placement.pages is None:
            continue
        each = -(-min(tokens, decision.layout.slots(tokens)) // placement.page_size)
        own = placement.pages // batch  # pages of each sequence
        endless = decision.layout.bounded and own * placement.page_size >= decision.layout.slots(None)
        most = None if endless else own * placement.page_size
        found[decision.layout] = Room(str(placement), placement.pages, placement.pages // each, most)
    return list(dict.fromkeys(found.values()))


def fit(plan: Plan, total: sympy.Expr, memory: int, batch: int, tokens: int) -> Fit:
    from kvcompile.layouts import symbols as sy

    most = _largest(total.subs(sy.B, batch), sy.T, memory)
    sequences = _largest(total.subs(sy.T, tokens), sy.B, memory)
    assert sequences is not None, "every sequence takes bytes"
    for room in pools(plan, batch, tokens):
        sequences = min(sequences, room.sequences)
        if room.tokens is not None:
            most = room.tokens if most is None else min(most, room.tokens)
    return Fit(memory, most, sequences)


def _largest(total: sympy.Expr, symbol: sympy.Symbol, limit: int) -> int | None:
    """The largest whole `symbol` with total <= limit; None where the total does not depend on it and fits."""

    def fits(count: int) -> bool:
        return bool(total.subs(symbol, count) <= limit)

    if symbol not in total.free_symbols:
        return None if fits(0) else 0
    if fits(MOST_BYTES):  # every layer's budget is full long before
        return None
    most = 1
    while fits(most):
        most *= 2
    least = 0  # where one does not fit, none does
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least
