"""Normal form of a softmax input: which keys a query sees, and what the score of a seen key becomes.

    where(seen, value, hidden),  hidden <= -1000 below a score of zero

An additive mask, a fill, a product with zeros and ones: all become cases, each under its condition. A case whose value
hides (`passes/score_mod/hiding.py`) is hidden. What is left is the value; terms that all keys of a row share are gone,
because a softmax does not see them (where there are sink logits it does, so then only terms that the sink shares are).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from kvcompile.expression import FALSE, TRUE, Expr, const, walk
from kvcompile.passes.score_mod import hiding
from kvcompile.passes.score_mod.make import and_, cast, make, not_, or_, where
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.passes.score_mod.ranges import LONGEST

_MOST = 48  # cases
_SPREAD = ("add", "sub", "mul", "div", "neg", "cast", "max", "min", "tanh")
_FAR = -1e30  # a clamp from below that no score reaches

Case = tuple[Expr, Expr]  # condition, value
Part = tuple[float, Expr]  # of a sum: 1 or -1, and a term


class NoNormalForm(Exception):
    """Why a softmax input has none; the text is the reason."""


@dataclass(frozen=True)
class Form:
    """seen: whether the query sees the key; value: of a seen key; sink: of the column without a value, or None.

    infinite: whether what hidden keys get is -inf
    reach: in texts of how many tokens the hidden are
    """

    seen: Expr
    value: Expr
    sink: Expr | None
    infinite: bool
    reach: int


def normal_form(e: Expr, sink: Expr | None, prover: Prover) -> Form:
    """Of a softmax input float32; raises NoNormalForm."""
    hidden, shown, infinite, reach = FALSE, [], True, LONGEST
    for condition, value in _cases(e):
        tokens = _reach(value)
        if tokens:
            hidden = or_(hidden, condition)
            infinite = infinite and hiding.is_infinite(value)
            reach = min(reach, tokens)
        else:
            shown.append((condition, value))
    if not shown:
        raise NoNormalForm("the mask hides everything")
    shown, sink = _without_row_terms(shown, sink)
    for _, value in shown:
        if any(node.is_const and node.is_float and not math.isfinite(node.value) for node in walk(value)):
            raise NoNormalForm("a hidden score goes through what may make it anything else")
    value = _merged(shown)
    return Form(prover.decided(not_(hidden)), value, sink, infinite, reach)


def _reach(value: Expr) -> int:
    try:
        return hiding.reach(value)
    except ValueError:
        raise NoNormalForm("the softmax input has cases that are no number") from None


def _merged(cases: list[Case]) -> Expr:
    *first, (_, found) = cases
    for condition, value in reversed(first):
        found = where(condition, value, found)
    return found


def _splits(e: Expr) -> bool:
    """Whether an expression of a score is worth cases: it has a `where` that hides, or chooses between scores.

    What a score itself chooses (a leaky ReLU of it) is a value, unless it hides.
    """
    if not e.is_float:
        return False
    if e.op == "where" and "score" in e.args[0].names:
        return any(_splits(arg) or _reach(arg) for arg in e.args[1:])
    if e.op == "where":
        return any(arg.is_const or "score" in arg.names or _splits(arg) for arg in e.args[1:])
    return e.op in _SPREAD and any(_splits(arg) for arg in e.args)


def _cases(e: Expr) -> list[Case]:
    if not _splits(e):
        return [(TRUE, e)]
    if e.op == "where":
        condition, yes, no = e.args
        found = [(and_(condition, c), v) for c, v in _cases(yes)]
        found += [(and_(not_(condition), c), v) for c, v in _cases(no)]
    else:
        together: list[tuple[Expr, tuple[Expr, ...]]] = [(TRUE, ())]
        for arg in e.args:
            together = [
                (both, (*values, value))
                for condition, values in together
                for c, value in _cases(arg)
                if (both := and_(condition, c)) is not FALSE
            ]
            if len(together) > _MOST:
                raise NoNormalForm("the mask is made of too many cases")
        found = [(condition, _applied(e, values)) for condition, values in together]
    kept: dict[Expr, Expr] = {}  # one case for each value
    for condition, value in found:
        if condition is not FALSE:
            kept[value] = or_(kept[value], condition) if value in kept else condition
    return [(condition, value) for value, condition in kept.items()]


def _applied(e: Expr, values: tuple[Expr, ...]) -> Expr:
    if e.op == "cast":
        return cast(values[0], e.dtype)
    for one, other in (values, values[::-1]) if len(values) == 2 else ():
        if not one.is_const:
            continue
        if e.op == "mul" and one.value == 0 and hiding.is_finite(other):
            return one
        if e.op == "add" and one.value == 0:
            return other  # which zero a softmax input is makes no difference
        if e.op == "max" and one.value <= _FAR:
            return one if _reach(other) == LONGEST else other
    return make(e.op, e.dtype, *values)


def terms(e: Expr, factor: float = 1.0) -> list[Part]:
    """A value as a sum: factors (1 or -1) and terms."""
    if e.op == "add":
        return terms(e.args[0], factor) + terms(e.args[1], factor)
    if e.op == "sub":
        return terms(e.args[0], factor) + terms(e.args[1], -factor)
    if e.op == "neg":
        return terms(e.args[0], -factor)
    if e.op == "cast" and e.args[0].is_float and e.is_float and "score" in e.names:
        return terms(e.args[0], factor)
    return [(factor, e)]


def summed(parts: list[Part]) -> Expr:
    """The sum of factors and terms, float32."""
    found: Expr | None = None
    for factor, term in sorted(parts, key=lambda part: part[0] < 0):
        term = cast(term, torch.float32)
        if found is None:
            found = term if factor > 0 else make("neg", torch.float32, term)
        else:
            found = make("add" if factor > 0 else "sub", torch.float32, found, term)
    return const(0, torch.float32) if found is None else found


def _without_row_terms(cases: list[Case], sink: Expr | None) -> tuple[list[Case], Expr | None]:
    """The cases without the terms that are the same for all keys of a row."""
    parts = [terms(value) for _, value in cases]
    own = None if sink is None else terms(sink)
    shared = Counter(part for part in parts[0] if _of_row(part[1]))
    for other in (*parts[1:], *([] if own is None else [own])):
        shared &= Counter(other)
    if not shared:
        return cases, None if own is None else summed(own)
    made = [
        (condition, summed(_less(found, shared))) for (condition, _), found in zip(cases, parts, strict=True)
    ]
    return made, None if own is None else summed(_less(own, shared))


def _less(parts: list[Part], gone: Counter[Part]) -> list[Part]:
    """The terms without some of them, each as often as it is among these."""
    left = Counter(gone)
    kept = []
    for part in parts:
        if left[part]:
            left[part] -= 1
        else:
            kept.append(part)
    return kept


def _of_row(term: Expr) -> bool:
    return not term.names & {"k", "score"} and hiding.is_finite(term)
