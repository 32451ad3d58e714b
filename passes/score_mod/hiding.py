"""Hiding: whether what is added to a score keeps its key from being seen, and in texts of how many tokens.

A value is bounded by what it is besides its score. A score counts as 0, and what weights and tokens bring along as one
at most, as softmax inputs are of that order; what positions add is counted in full: `s + 10 * k - 2000` hides the first
keys alone, and a slope times a distance reaches any constant at some length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kvcompile.expression import REDUCTIONS, Expr
from kvcompile.passes.score_mod.ranges import LONGEST, Ranges

# What is this far below a score of zero weighs nothing after the softmax; -1e4, finfo.min, -inf are.
HIDDEN = -1000.0
_SHORT = 1024  # tokens: what hides in shorter texts alone is a value like any other
_ANY = 1e37  # of what no bound is known, nor whether it is a number

Bounds = tuple[float, float]

_RISING: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "expm1": math.expm1,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
}
# Defined above these.
_FROM: dict[str, tuple[float, Callable[[float], float]]] = {
    "sqrt": (0.0, math.sqrt),
    "log": (0.0, math.log),
    "log2": (0.0, math.log2),
    "log10": (0.0, math.log10),
    "log1p": (-1.0, math.log1p),
}
_FLAT = ("tanh", "sigmoid", "sin", "cos", "erf", "sign")  # between -1 and 1


def reach(value: Expr) -> int:
    """In texts of how many tokens a value hides, at most `LONGEST`; 0: it does not, in texts of any use.

    Raises ValueError where it is no number.
    """
    if _high(value, LONGEST) <= HIDDEN:
        return LONGEST
    if _high(value, _SHORT) > HIDDEN:
        return 0
    low, high = _SHORT, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _high(value, middle) <= HIDDEN else (low, middle)
    return low


def is_infinite(value: Expr) -> bool:
    """Whether a value that hides is -inf."""
    return _high(value, LONGEST) == -math.inf


def is_finite(value: Expr) -> bool:
    """Whether a value is surely a number as long as its score is."""
    low, high = _Bound(LONGEST).of(value)
    return low > -_ANY and high < _ANY


def _high(value: Expr, longest: int) -> float:
    found = _Bound(longest).of(value)[1]
    if found != found:
        raise ValueError("no number")
    return found


class _Bound:
    """Bounds of floats in texts of up to `longest` tokens."""

    def __init__(self, longest: int):
        self._ranges = Ranges(longest)
        self._known: dict[Expr, Bounds] = {}
        self._vague: set[Expr] = set()  # of these, or of what is in them, no bound is known

    def of(self, e: Expr) -> Bounds:
        if e not in self._known:
            self._known[e] = self._of(e)
        return self._known[e]

    def _of(self, e: Expr) -> Bounds:
        if e.is_const:
            return float(e.value), float(e.value)
        if e.op == "score" or e.op in REDUCTIONS or e.op in ("softmax", "log_softmax"):
            return 0.0, 0.0
        if e.op == "leaf" and e.is_float:
            return -1.0, 1.0
        if not e.is_float:
            ends = self._ranges.exact(e) if e.is_int else None
            return self._any(e) if ends is None else (float(ends.low), float(ends.high))
        parts = e.args[1:] if e.op == "where" else e.args
        args = [self.of(arg) for arg in parts]
        vague = not self._vague.isdisjoint(parts)
        if vague:
            self._vague.add(e)
        if e.op == "where":
            return _hull(*args[0], *args[1])
        moved = _moved(e.op, args)
        most = torch.finfo(e.dtype).max
        if moved is not None:
            overflows = e.op == "cast" and not vague
            return (_beyond(moved[0], most), _beyond(moved[1], most)) if overflows else moved
        found = None if vague else _computed(e, args)
        if found is None or any(most < abs(end) < math.inf for end in found):
            return self._any(e)
        return found

    def _any(self, e: Expr) -> Bounds:
        self._vague.add(e)
        return -_ANY, _ANY


def _moved(op: str, args: list[Bounds]) -> Bounds | None:
    """Bounds of what is no larger than its operands together; None: another operator."""
    (low, high), (other_low, other_high) = args[0], args[-1]
    match op:
        case "cast":
            return low, high
        case "add":
            return low + other_low, high + other_high
        case "sub":
            return low - other_high, high - other_low
        case "neg":
            return -high, -low
        case "min":
            return min(low, other_low), min(high, other_high)
        case "max":
            return max(low, other_low), max(high, other_high)
    return None


def _computed(e: Expr, args: list[Bounds]) -> Bounds | None:
    """Bounds of a product, a quotient or a function; None: not known."""
    (low, high), (other_low, other_high) = args[0], args[-1]
    match e.op:
        case "mul" if e.args[0] is e.args[1]:
            return (0.0 if low <= 0 <= high else min(low * low, high * high)), max(low * low, high * high)
        case "mul":
            return _hull(low * other_low, low * other_high, high * other_low, high * other_high)
        case "div" if other_low > 0 or other_high < 0:
            return _hull(low / other_low, low / other_high, high / other_low, high / other_high)
        case "abs":
            return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
    if e.op in _FLAT:
        return -1.0, 1.0
    if e.op in _RISING:
        return _rising(_RISING[e.op], low), _rising(_RISING[e.op], high)
    if e.op in _FROM and low > _FROM[e.op][0]:
        return _rising(_FROM[e.op][1], low), _rising(_FROM[e.op][1], high)
    if e.op == "sqrt" and low == 0:
        return 0.0, math.sqrt(high)
    return None


def _beyond(x: float, most: float) -> float:
    """A number as a dtype has it whose largest is `most`."""
    return math.copysign(math.inf, x) if abs(x) > most else x


def _rising(function: Callable[[float], float], x: float) -> float:
    try:
        return function(x)
    except OverflowError:
        return x if math.isinf(x) else _ANY


def _hull(*ends: float) -> Bounds:
    """The least and the greatest; no number where one is none."""
    if any(end != end for end in ends):
        return math.nan, math.nan
    return min(ends), max(ends)
