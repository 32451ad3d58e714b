"""Ranges: between which ends the values of an expression lie, where computing them neither rounds nor wraps.

Integers lie in their dtype, floats are whole multiples of a power of two that their mantissa holds: then they are what
arithmetic says, for texts of up to `LONGEST` tokens. What rounds, overflows, or is not known has no range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from kvcompile.expression import Expr

LONGEST = 2**22  # tokens of a text
# What tokens bring along and tables hold as int64 (ids, counts, places) is taken to be within these.
_BROUGHT = 2**40
_PLACES = 2**48  # elements of a tensor
_COUNTS = 2**31  # heads, sequences, channels
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

Number = int | Fraction


@dataclass(frozen=True)
class Exact:
    """Values that are whole multiples of `step`, a power of two, between `low` and `high`."""

    low: Number
    high: Number
    step: Number

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether all of them are numbers of a dtype."""
        if not dtype.is_floating_point:
            ends = torch.iinfo(dtype)
            return ends.min <= self.low and self.high <= ends.max and self.step >= 1
        if dtype not in _MANTISSA:
            return False
        # Below the smallest normal number a dtype has fewer digits, and some machines none.
        within = self.step >= torch.finfo(dtype).smallest_normal and self.most <= torch.finfo(dtype).max
        return within and self.most / self.step <= 2 ** _MANTISSA[dtype]

    @property
    def most(self) -> Number:
        """The largest magnitude."""
        return max(self.high, -self.high, self.low, -self.low)


class Ranges:
    """The ranges of expressions, each found once. longest: tokens of a text"""

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._known: dict[
            Expr, Exact | None
        ] = {}  # holds the expressions, which are found again by what they are

    def exact(self, e: Expr) -> Exact | None:
        """The range of a number; None: not known, or its computation may round or wrap."""
        if e not in self._known:
            found = self._range(e)
            self._known[e] = found if found is not None and found.fits(e.dtype) else None
        return self._known[e]

    def most(self, e: Expr) -> Number:
        """The largest magnitude of an integer; that of its dtype where no more is known."""
        found = self.exact(e)
        return -torch.iinfo(e.dtype).min if found is None else found.most

    def _range(self, e: Expr) -> Exact | None:
        match e.op:
            case "q" | "k" | "n":
                return Exact(0, self._longest, 1)
            case "h" | "b" | "nb" | "r":
                return Exact(0, _COUNTS, 1)
            case "const":
                if not math.isfinite(e.value):
                    return None
                value = Fraction(e.value)
                return Exact(value, value, min(Fraction(1, value.denominator), Fraction(1)))
            case "leaf" if e.is_int:
                if e.dtype is torch.int64:
                    return Exact(-_BROUGHT, _BROUGHT, 1)
                ends = torch.iinfo(e.dtype)
                return Exact(ends.min, ends.max, 1)
            case "flat":
                return Exact(0, _PLACES, 1)
            case "where":
                a, b = self.exact(e.args[1]), self.exact(e.args[2])
                return a and b and Exact(min(a.low, b.low), max(a.high, b.high), min(a.step, b.step))
            case "cast" if e.is_int and e.args[0].is_float and self.exact(e.args[0]) is None:
                return _whole(e.args[0].dtype, e.dtype)
        parts = [self.exact(arg) for arg in e.args if not arg.is_bool]
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(e.args):
            return None
        return _of_integers(e, known) if e.is_int else _of_numbers(e, known)


def _whole(source: torch.dtype, dtype: torch.dtype) -> Exact:
    """What any float is as an integer; what none can be is the least one, or whatever the machine likes."""
    size = torch.iinfo(dtype).max + 1  # a power of two: the float before it is further away the larger it is
    below = max(size // 2 ** _MANTISSA.get(source, 53), 1)
    return Exact(torch.iinfo(dtype).min, min(size - below, int(torch.finfo(source).max)), 1)


def _of_integers(e: Expr, parts: Sequence[Exact]) -> Exact | None:
    """What floats have no operator for, or round."""
    first, last = parts[0], parts[-1]
    by = int(last.low) if last.low == last.high else None
    ends = (int(first.low), int(first.high))
    match e.op:
        case "sum":
            low = high = int(e.value[0])
            for factor, part in zip(e.value[1:], parts, strict=True):
                low += min(factor * part.low, factor * part.high)
                high += max(factor * part.low, factor * part.high)
            return Exact(low, high, 1)
        case "cast":  # towards zero
            return Exact(math.trunc(first.low), math.trunc(first.high), 1)
        case "floordiv" | "truncdiv" if by:
            whole = [end // by if e.op == "floordiv" else math.trunc(Fraction(end, by)) for end in ends]
            return Exact(min(whole), max(whole), 1)
        case "mod" if by:
            return Exact(min(by + 1, 0), max(by - 1, 0), 1)
        case "floordiv" | "truncdiv":
            return Exact(-first.most, first.most, 1)
        case "mod":
            return Exact(-last.most, last.most, 1)
        case "shl" if by is not None and 0 <= by < 63:
            return Exact(first.low * 2**by, first.high * 2**by, 1)
        case "shr" if by is not None and by >= 0:
            return Exact(ends[0] >> by, ends[1] >> by, 1)
        case "and" if by is not None and by >= 0:
            return Exact(0, by, 1)
        case "and" | "or" | "xor":
            size = 2 ** max(int(end).bit_length() for part in parts for end in (part.low, part.high))
            signed = any(part.low < 0 for part in parts)
            return Exact(-size if signed else 0, size - 1, 1)
        case "bitnot":
            return Exact(~ends[1], ~ends[0], 1)
    return _of_numbers(e, parts)


def _of_numbers(e: Expr, parts: Sequence[Exact]) -> Exact | None:
    first, last = parts[0], parts[-1]
    step = min(first.step, last.step)
    match e.op:
        case "add":
            return Exact(first.low + last.low, first.high + last.high, step)
        case "sub":
            return Exact(first.low - last.high, first.high - last.low, step)
        case "neg":
            return Exact(-first.high, -first.low, first.step)
        case "abs":
            return Exact(0, first.most, first.step)
        case "mul":
            ends = [a * b for a in (first.low, first.high) for b in (last.low, last.high)]
            return Exact(min(ends), max(ends), first.step * last.step)
        case "div" if last.low == last.high and _is_power(last.low):
            by = Fraction(last.low)
            return Exact(first.low / by, first.high / by, first.step / by)
        case "mod" if last.low == last.high and last.low > 0:
            return Exact(0, last.low, step)
        case "min":
            return Exact(min(first.low, last.low), min(first.high, last.high), step)
        case "max":
            return Exact(max(first.low, last.low), max(first.high, last.high), step)
        case "sign":
            return Exact(-1, 1, 1)
        case "floor":
            return Exact(math.floor(first.low), math.floor(first.high), 1)
        case "ceil":
            return Exact(math.ceil(first.low), math.ceil(first.high), 1)
        case "trunc":
            return Exact(math.trunc(first.low), math.trunc(first.high), 1)
        case "cast":
            return first
    return None


def _is_power(value: Number) -> bool:
    """Whether a number is a power of two."""
    return value > 0 and math.frexp(float(value))[0] == 0.5


def negative_zero(e: Expr) -> bool:
    """Whether a float may be -0.0, which equals 0.0 and yet is another divisor."""
    match e.op:
        case "const":
            return bool(e.value == 0 and math.copysign(1.0, e.value) < 0)
        case "cast" if e.args[0].is_int:
            return False
        case "cast" if torch.promote_types(e.args[0].dtype, e.dtype) is e.dtype:
            # Else what is small vanishes.
            return negative_zero(e.args[0])
        case "abs" | "exp" | "exp2" | "sigmoid":
            return False
        case "add":
            return all(negative_zero(arg) for arg in e.args)
        case "sub":
            return negative_zero(e.args[0])
        case "where":
            return any(negative_zero(arg) for arg in e.args[1:])
    return True
