"""Expressions in normal form: built here, and nowhere else, so that equal things look equal.

Constants are folded as PyTorch computes them in their dtype. Sums of integers are collected, a comparison of integers
that cannot wrap becomes `x >= 0` or `x == 0`, a cast of a truth value becomes a `where`. No rule changes what an
expression computes, to the last bit.

A constant may be a literal, which its dtype does not hold: arithmetic of a half computes with it in float32, comparing
and choosing round it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kvcompile.expression import FALSE, TRUE, Expr, const, integer
from kvcompile.kernels.shared.expression import apply
from kvcompile.kernels.shared.expression import cast as cast_value
from kvcompile.passes.score_mod.ranges import Ranges, negative_zero

_CPU = torch.device("cpu")
# Integers of these widths hold every position and size: a cast between them changes nothing.
_WIDE = (torch.int32, torch.int64)

Linear = tuple[int, dict[Expr, int]]  # a constant, and the factor of each term


def make(op: str, dtype: torch.dtype, *args: Expr) -> Expr:
    """An operator on operands that have the dtype it computes in."""
    if op in ("eq", "ge", "gt"):
        args = tuple(map(rounded, args))
    if all(arg.is_const for arg in args):
        return _folded(op, dtype, args)
    pushed = _over_where(op, dtype, args)
    if pushed is not None:
        return pushed
    if op in _BOOLEAN and all(arg.is_bool for arg in args):
        return _BOOLEAN[op](*args)
    if op == "where":
        return where(*args)
    if op in ("eq", "ge", "gt") and all(arg.is_int for arg in args):
        return compare(op, *args)
    if op in ("eq",) and all(arg.is_bool for arg in args):
        return not_(_BOOLEAN["xor"](*args))
    if dtype in _WIDE and op in ("add", "sub", "mul", "neg"):
        found = _linear_of(op, args)
        if found is not None:
            return from_linear(found, dtype)
    if dtype in _WIDE and op in ("floordiv", "mod") and args[1].is_const and args[1].value == 1:
        return args[0] if op == "floordiv" else const(0, dtype)
    if dtype.is_floating_point:
        same = _neutral(op, args)
        if same is not None:
            return same
    if op in ("min", "max") and args[0] is args[1]:
        return args[0]
    return Expr(op, dtype, args)


def _folded(op: str, dtype: torch.dtype, args: Sequence[Expr]) -> Expr:
    # A literal beside a tensor stays one, as it is for the operator that is folded.
    literal = [rounded(arg) is not arg for arg in args]
    values = [
        arg.value if plain and not all(literal) else torch.tensor([arg.value], dtype=arg.dtype)
        for arg, plain in zip(args, literal, strict=True)
    ]
    found = apply(op, values, dtype, _CPU)
    return const(found.to(dtype).item(), dtype)


def rounded(e: Expr) -> Expr:
    """A literal as its dtype holds it."""
    if not (e.is_const and e.is_float):
        return e
    return const(torch.tensor(e.value, dtype=e.dtype).item(), e.dtype)


def _over_where(op: str, dtype: torch.dtype, args: Sequence[Expr]) -> Expr | None:
    """f(where(c, 1, 2), 3) is where(c, f(1, 3), f(2, 3)): with constants alone nothing is computed twice."""
    if op in ("where", "and", "or", "not", "xor"):
        return None
    if op == "mul" and not dtype.is_floating_point:  # what is chosen or nothing, times a number
        for one, other in (args, args[::-1]):
            if one.op == "where" and one.args[1].is_const and one.args[2].is_const and one.args[2].value == 0:
                return where(one.args[0], make("mul", dtype, one.args[1], other), const(0, dtype))
    chosen = [arg for arg in args if arg.op == "where"]
    if len(chosen) != 1 or not all(arg.is_const for arg in args if arg is not chosen[0]):
        return None
    condition, yes, no = chosen[0].args
    if not (yes.is_const and no.is_const):
        return None
    first, second = (
        make(op, dtype, *(branch if arg is chosen[0] else arg for arg in args)) for branch in (yes, no)
    )
    return where(condition, first, second)


def _neutral(op: str, args: Sequence[Expr]) -> Expr | None:
    """x + 0, x * 1 and the like."""
    if op in ("add", "mul") and len(args) == 2:
        for one, other in (args, args[::-1]):
            if other.is_const and (other.value == 1 if op == "mul" else _nothing(other, one)):
                return one
    if op == "neg" and args[0].op == "neg":
        return args[0].args[0]
    if op == "mul":
        for one, other in (args, args[::-1]):
            if one.is_const and one.value == -1:
                return make("neg", other.dtype, other)
    if op == "div" and args[1].is_const and args[1].value == 1:
        return args[0]
    if op == "sub" and args[1].is_const and _nothing(const(-args[1].value, args[1].dtype), args[0]):
        return args[0]
    return None


def _nothing(zero: Expr, e: Expr) -> bool:
    """Whether adding a constant changes nothing: -0.0 + 0.0 is 0.0. Of a score's zero nobody asks the sign."""
    return zero.value == 0 and (negative_zero(zero) or not negative_zero(e) or "score" in e.names)


# Truth values.


def not_(a: Expr) -> Expr:
    if a.is_const:
        return FALSE if a.value else TRUE
    return a.args[0] if a.op == "not" else Expr("not", torch.bool, (a,))


def and_(*args: Expr) -> Expr:
    found: list[Expr] = []
    for arg in args:
        for part in arg.args if arg.op == "and" else (arg,):
            if part is FALSE or not_(part) in found:
                return FALSE
            if part is not TRUE and part not in found:
                found.append(part)
    if not found:
        return TRUE
    return found[0] if len(found) == 1 else Expr("and", torch.bool, tuple(found))


def or_(*args: Expr) -> Expr:
    found: list[Expr] = []
    for arg in args:
        for part in arg.args if arg.op == "or" else (arg,):
            if part is TRUE or not_(part) in found:
                return TRUE
            if part is not FALSE and part not in found:
                found.append(part)
    if not found:
        return FALSE
    return found[0] if len(found) == 1 else Expr("or", torch.bool, tuple(found))


def _xor(a: Expr, b: Expr) -> Expr:
    for one, other in ((a, b), (b, a)):
        if one is FALSE:
            return other
        if one is TRUE:
            return not_(other)
    return FALSE if a is b else Expr("xor", torch.bool, (a, b))


_BOOLEAN: dict[str, Callable[..., Expr]] = {"and": and_, "or": or_, "not": not_, "xor": _xor}


def where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    yes, no = rounded(yes), rounded(no)
    if condition.is_const:
        return yes if condition.value else no
    if yes is no:
        return yes
    if condition.op == "not":
        return where(condition.args[0], no, yes)
    if yes.is_bool:
        return or_(and_(condition, yes), and_(not_(condition), no))
    if yes.op == "where" and yes.args[0] is condition:
        yes = yes.args[1]
    if no.op == "where" and no.args[0] is condition:
        no = no.args[2]
    return yes if yes is no else Expr("where", yes.dtype, (condition, yes, no))


# Integers.


def linear(e: Expr) -> Linear:
    """An integer expression as a constant and factors of terms that are no sums."""
    if e.is_const:
        return int(e.value), {}
    if e.op == "sum" and isinstance(e.value, tuple):
        return e.value[0], dict(zip(e.args, e.value[1:], strict=True))
    return 0, {e: 1}


def from_linear(found: Linear, dtype: torch.dtype = torch.int64) -> Expr:
    """The expression of a constant and factors: `sum`, whose value is the constant and then each term's factor."""
    offset, factors = _wrapped(found[0], dtype), _whole(found[1])
    terms = [(term, own) for term, factor in factors.items() if (own := _wrapped(factor, dtype))]
    if not terms:
        return const(offset, dtype)
    if len(terms) == 1 and terms[0][1] == 1 and not offset:
        return terms[0][0]
    terms.sort(key=lambda pair: (pair[0].op, repr(pair[0])))
    return Expr("sum", dtype, tuple(term for term, _ in terms), (offset, *(factor for _, factor in terms)))


def _wrapped(value: int, dtype: torch.dtype) -> int:
    """A number as integers of a dtype count round."""
    least, size = int(torch.iinfo(dtype).min), 1 << int(torch.iinfo(dtype).bits)
    return (value - least) % size + least


def _whole(factors: dict[Expr, int]) -> dict[Expr, int]:
    """c * (x // c) + x % c is x."""
    for term, factor in list(factors.items()):
        if term.op != "mod" or not term.args[1].is_const:
            continue
        x, c = term.args
        quotient = Expr("floordiv", term.dtype, (x, c))
        if factor and factors.get(quotient) == factor * c.value:
            factors = {**factors, term: 0, quotient: 0}
            factors[x] = factors.get(x, 0) + factor
    return factors


def _linear_of(op: str, args: Sequence[Expr]) -> Linear | None:
    if op == "mul":
        for one, other in (args, args[::-1]):
            if one.is_const:
                offset, factors = linear(other)
                return offset * one.value, {term: factor * one.value for term, factor in factors.items()}
        return None
    offset, factors = linear(args[0])
    if op == "neg":
        return -offset, {term: -factor for term, factor in factors.items()}
    sign = 1 if op == "add" else -1
    more, others = linear(args[1])
    for term, factor in others.items():
        factors[term] = factors.get(term, 0) + sign * factor
    return offset + sign * more, factors


def add(*args: Expr) -> Expr:
    found = args[0]
    for arg in args[1:]:
        found = make("add", torch.int64, found, arg)
    return found


def sub(a: Expr, b: Expr) -> Expr:
    return make("sub", torch.int64, a, b)


def compare(op: str, a: Expr, b: Expr) -> Expr:
    """eq, ge or gt of integers: of their difference and 0, with a positive first factor where the order is free."""
    a, b = _wide(a), _wide(b)
    found = _linear_of("sub", (a, b))
    assert found is not None
    if not all(_is_whole(side) for side in (linear(a), linear(b), found)):
        return _as_it_is(op, a, b)
    offset, factors = found[0], _whole(found[1])
    if op == "gt":
        op, offset = "ge", offset - 1
    factors = {term: factor for term, factor in factors.items() if factor}
    if not factors:
        return TRUE if (offset == 0 if op == "eq" else offset >= 0) else FALSE
    common = math.gcd(*factors.values())
    if op == "eq":
        if offset % common:
            return FALSE
        first = min(factors, key=lambda term: (term.op, repr(term)))
        common = -common if factors[first] < 0 else common
        offset //= common
    else:
        offset //= common
    terms = {term: factor // common for term, factor in factors.items()}
    return Expr(op, torch.bool, (from_linear((offset, terms)), integer(0)))


def _as_it_is(op: str, a: Expr, b: Expr) -> Expr:
    """A comparison of what may wrap; one of a sum with 0 would be another that may not."""
    if b.is_const and b.value == 0:
        return (
            Expr("eq", torch.bool, (b, a))
            if op == "eq"
            else Expr("gt", torch.bool, (a, integer(-(op == "ge"))))
        )
    return Expr(op, torch.bool, (a, b))


def _is_whole(found: Linear) -> bool:
    """Whether no sum of some of the terms wraps, so that they may stand on either side."""
    ranges = Ranges()
    offset, factors = found
    return abs(offset) + sum(abs(by) * ranges.most(term) for term, by in factors.items() if by) < 2**63


def _wide(e: Expr) -> Expr:
    return cast(e, torch.int64)


def le(a: Expr, b: Expr) -> Expr:
    return compare("ge", b, a)


def lt(a: Expr, b: Expr) -> Expr:
    return compare("gt", b, a)


def equal(a: Expr, b: Expr) -> Expr:
    return compare("eq", a, b)


def clamped(x: Expr, low: Expr, high: Expr) -> Expr:
    return make("min", x.dtype, make("max", x.dtype, x, low), high)


def cast(e: Expr, dtype: torch.dtype) -> Expr:
    """The expression in another dtype."""
    if e.dtype is dtype:
        return e
    if e.is_const:
        return const(cast_value(torch.tensor(e.value, dtype=e.dtype), dtype).item(), dtype)
    if e.is_bool:
        return where(e, const(1, dtype), const(0, dtype))
    if e.op == "where" and e.args[1].is_const and e.args[2].is_const:
        return where(e.args[0], cast(e.args[1], dtype), cast(e.args[2], dtype))
    if dtype is torch.bool:
        if e.is_int:
            return not_(compare("eq", e, const(0, e.dtype)))
        return not_(make("eq", torch.bool, e, const(0, e.dtype)))
    return Expr("cast", dtype, (e,))
