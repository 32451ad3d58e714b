"""Expressions at the edges of their dtype: the last integer of a mantissa, the least normal number, the ends.

Drawn from places that are few (`q % 17`), moved to an edge, and then computed with: by one operator too many something
rounds, wraps or vanishes. `exactly` is what arithmetic says of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch

from kvcompile.expression import Expr, H, K, Q, const
from kvcompile.passes.score_mod.ranges import Ranges
from tests.proofs.draw import BOOL, INT64, Drawn

MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Edges:
    """Expressions of one random generator."""

    def __init__(self, d: Drawn):
        self.d, self.random = d, d.random

    def any(self) -> Expr:
        if self.d.chance(0.5):
            return self.integer(self.random.choice(INTEGERS), self.random.randrange(1, 4))
        return self.floating(self.random.choice(tuple(MANTISSA)), self.random.randrange(1, 4))

    def _few(self) -> Expr:
        place = self.random.choice((Q, K, Expr("sub", INT64, (Q, K)), H))
        if self.d.chance(0.2):
            return place
        few = Expr("mod", INT64, (place, const(self.random.choice((2, 3, 5, 16, 17, 100)), INT64)))
        return (
            few
            if self.d.chance(0.6)
            else Expr("sub", INT64, (few, const(self.random.choice((2, 9, 60)), INT64)))
        )

    def _another(self, dtype: torch.dtype) -> Expr:
        """A divisor that is no constant, and never 0."""
        found = Expr("add", INT64, (Expr("mod", INT64, (K, const(3, INT64))), const(1, INT64)))
        return _cast(found, dtype)

    def integer(self, dtype: torch.dtype, depth: int) -> Expr:
        if depth == 0:
            return _cast(self._few(), dtype)
        x = self.integer(dtype, depth - 1)
        ends = torch.iinfo(dtype)
        small = const(self.random.choice((1, 2, 3, 5, 7)), dtype)

        def edge() -> Expr:
            most = 2 ** self.random.choice(
                (ends.bits - 2, ends.bits - 1, 24, 11, 53)
            ) - self.random.randrange(20)
            return const(min(max(self.random.choice((-1, 1)) * most, ends.min), ends.max), dtype)

        match self.random.randrange(14):
            case 0 | 1:
                return Expr(self.d.one("add", "sub"), dtype, (x, edge()))
            case 2:
                return Expr(
                    self.d.one("add", "sub", "min", "max"), dtype, (x, self.integer(dtype, depth - 1))
                )
            case 3:
                return Expr("mul", dtype, (x, self.d.random.choice((small, edge(), x))))
            case 4:
                return Expr(self.d.one("neg", "abs", "sign", "bitnot") if ends.min else "bitnot", dtype, (x,))
            case 5:
                return Expr(self.d.one("floordiv", "truncdiv", "mod"), dtype, (x, small))
            case 6 if ends.min:
                by = const(-int(small.value), dtype)
                return Expr(self.d.one("floordiv", "truncdiv", "mod"), dtype, (x, by))
            case 7:
                by = const(self.random.choice((0, 1, 3, ends.bits - 3, ends.bits - 2)), dtype)
                return Expr("shl", dtype, (x, by))
            case 8:
                return Expr("shr", dtype, (x, const(self.random.choice((0, 1, 3, ends.bits - 1)), dtype)))
            case 9:
                return Expr(self.d.one("and", "or", "xor"), dtype, (x, self.d.random.choice((small, edge()))))
            case 10:
                return Expr(self.d.one("and", "or", "xor"), dtype, (x, self.integer(dtype, depth - 1)))
            case 11:
                return Expr("where", dtype, (Expr("ge", BOOL, (Q, K)), x, edge()))
            case 12:
                return _cast(self.integer(self.random.choice(INTEGERS), depth - 1), dtype)
            case _:
                kind = self.random.choice((torch.float32, torch.float64))
                inner = self.floating(kind, depth - 1)
                for op, end in (("max", ends.min // 4), ("min", ends.max // 4)):  # beyond, a cast is anything
                    inner = Expr(op, kind, (inner, const(float(end), kind)))
                return _cast(inner, dtype)

    def floating(self, dtype: torch.dtype, depth: int) -> Expr:
        if depth == 0:
            return _cast(self._few(), dtype)
        x = self.floating(dtype, depth - 1)
        info = torch.finfo(dtype)
        least = math.frexp(info.smallest_normal)[1] - 1  # the exponent of the least normal number
        most = math.frexp(info.max)[1]

        def edge() -> Expr:
            return const(2.0 ** MANTISSA[dtype] - self.random.randrange(20), dtype)

        def power() -> Expr:
            small = (-least - 3, -least, -least + 1, -least + 4, MANTISSA[dtype] - least + 1)
            by = self.random.choice((-1, -1, 1)) * self.random.choice((1, 2, *small, most - 5, most - 1))
            sign = self.random.choice((1, 1, 1, -1))
            return const(sign * math.ldexp(1.0, min(by, most - 1)), dtype)

        match self.random.randrange(15):
            case 13:
                by = self.random.choice((const(3.0, dtype), const(-2.0, dtype), self._another(dtype)))
                return Expr(self.d.one("div", "mod"), dtype, (x, by))
            case 14:  # a little less than nothing, which a narrower dtype takes for -0.0
                tiny = math.ldexp(1.0, max(least, -40))
                scaled = Expr("mul", dtype, (x, const(tiny, dtype)))
                return Expr("sub", dtype, (scaled, const(3 * tiny, dtype)))
            case 0 | 1:
                return Expr(self.d.one("add", "sub"), dtype, (x, edge()))
            case 2 | 3:
                return Expr(self.d.one("mul", "div"), dtype, (x, power()))
            case 4:
                return Expr("mul", dtype, (x, const(self.random.choice((3.0, -5.0, 0.75, 1.0, -1.0)), dtype)))
            case 5:
                return Expr(self.d.one("add", "sub", "mul"), dtype, (x, self.floating(dtype, depth - 1)))
            case 6:
                return Expr(self.d.one("neg", "abs", "sign"), dtype, (x,))
            case 7 | 8:
                return Expr(self.d.one("floor", "ceil", "trunc", "round"), dtype, (x,))
            case 9:
                return Expr("mod", dtype, (x, const(self.random.choice((2.5, 3.0, 0.75, 16.0)), dtype)))
            case 10:
                return Expr(
                    self.d.one("min", "max"), dtype, (x, const(self.random.choice((3.0, -2.5, 7.5)), dtype))
                )
            case 11:
                other = self.random.choice((edge(), edge(), const(-0.0, dtype), const(math.inf, dtype)))
                return Expr("where", dtype, (Expr("ge", BOOL, (Q, K)), x, other))
            case _:
                return _cast(self.floating(self.random.choice(tuple(MANTISSA)), depth - 1), dtype)


def _cast(e: Expr, dtype: torch.dtype) -> Expr:
    return e if e.dtype is dtype else Expr("cast", dtype, (e,))


def exactly(e: Expr, q: int, k: int, h: int, value: Callable[[Expr], Fraction]) -> Fraction:
    """What arithmetic says an expression is, of numbers that neither round nor wrap.

    value: of the integer that a float without a range is cast to; nothing but its range is said of it
    """
    made: dict[Expr, Fraction] = {}
    ranges = Ranges()

    def of(node: Expr) -> Fraction:
        if node not in made:
            cast = node.is_int and node.op == "cast" and node.args[0].is_float
            unknown = cast and ranges.exact(node.args[0]) is None
            made[node] = (
                value(node)
                if unknown
                else _computed(node, [of(arg) for arg in node.args], {"q": q, "k": k, "h": h})
            )
        return made[node]

    return of(e)


def _computed(node: Expr, args: list[Fraction], at: dict[str, int]) -> Fraction:
    a, b = (args[0] if args else Fraction(0)), (args[-1] if args else Fraction(0))
    match node.op:
        case "const":
            return Fraction(node.value)
        case "q" | "k" | "h":
            return Fraction(at[node.op])
        case "sum":
            return Fraction(
                node.value[0] + sum(factor * arg for factor, arg in zip(node.value[1:], args, strict=True))
            )
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case "div":
            return a / b
        case "floordiv":
            return Fraction(math.floor(a / b))
        case "truncdiv":
            return Fraction(math.trunc(a / b))
        case "mod":
            return a - b * math.floor(a / b)
        case "neg":
            return -a
        case "abs":
            return abs(a)
        case "sign":
            return Fraction((a > 0) - (a < 0))
        case "min":
            return min(a, b)
        case "max":
            return max(a, b)
        case "floor":
            return Fraction(math.floor(a))
        case "ceil":
            return Fraction(math.ceil(a))
        case "trunc":
            return Fraction(math.trunc(a))
        case "round":
            return Fraction(round(a))
        case "shl":
            return a * 2 ** int(b)
        case "shr":
            return Fraction(int(a) >> int(b))
        case "and":
            return Fraction(all(args) if node.is_bool else int(a) & int(b))
        case "or":
            return Fraction(any(args) if node.is_bool else int(a) | int(b))
        case "xor":
            return Fraction(int(a) ^ int(b))
        case "bitnot":
            return Fraction(~int(a))
        case "not":
            return Fraction(not a)
        case "where":
            return args[1] if a else args[2]
        case "eq":
            return Fraction(a == b)
        case "ge":
            return Fraction(a >= b)
        case "gt":
            return Fraction(a > b)
        case "cast":
            return Fraction(math.trunc(a)) if node.is_int else a
    raise KeyError(node.op)
