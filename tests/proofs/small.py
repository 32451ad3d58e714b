"""Small expressions of what simplifying treats apart: zeros, ones, negations, choices, constants that hold.

What `draw.py` draws is deep and rarely has two of them next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import torch

from kvcompile.expression import Expr, H, K, Q, const
from tests.proofs.draw import BOOL, INT64, _cast, simplified
from tests.proofs.values import Text, same

_TEXT = Text.of((0, 1, 2, 3, 5, 8))
_INTEGERS = (INT64, INT64, torch.int32, torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float32, torch.float16, torch.float64)
_BOTH = ("add", "sub", "mul", "min", "max")
_OF_INTEGERS = (*_BOTH, "floordiv", "truncdiv", "mod", "shl", "shr", "and", "or", "xor")
_REALS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.1, 7.9999999999, math.inf, -math.inf)


class _Small:
    def __init__(self, seed: int):
        self.random = Random(seed)

    def choice(self, items: Sequence[Expr]) -> Expr:
        return self.random.choice(items)

    def claim(self, depth: int) -> Expr:
        leaves = (
            *(Expr("ge", BOOL, (Q, K)), Expr("eq", BOOL, (Q, K)), Expr("gt", BOOL, (K, const(3, INT64)))),
            *(Expr("eq", BOOL, (Q, Q)), Expr("gt", BOOL, (K, K))),  # always, and never
        )
        if depth == 0:
            return self.choice(leaves)
        match self.random.randrange(8):
            case 0:
                return Expr("not", BOOL, (self.claim(depth - 1),))
            case 1 | 2:
                x = self.claim(depth - 1)
                other = self.choice((x, Expr("not", BOOL, (x,)), self.claim(depth - 1)))
                return Expr(self.random.choice(("and", "or", "xor", "eq")), BOOL, (x, other))
            case 3:
                return Expr("where", BOOL, tuple(self.claim(depth - 1) for _ in range(3)))
            case 4:
                dtype = self.random.choice((*_INTEGERS, *_FLOATS))
                return _cast(self.number(depth - 1, dtype), BOOL)
            case 5:
                return self.multiples()
            case _:
                dtype = self.random.choice((*_INTEGERS, *_FLOATS))
                x = self.number(depth - 1, dtype)
                args = (x, self.choice((x, self.literal(dtype), self.number(depth - 1, dtype))))
                return Expr(self.random.choice(("eq", "ge", "gt")), BOOL, args)

    def multiples(self) -> Expr:
        """Multiples of one number beside another, which they may never be."""

        def made() -> Expr:
            by = const(self.random.choice((2, 3, -3, 6, 2**62)), INT64)
            places = [Expr("mul", INT64, (self.choice((Q, K, H)), by)) for _ in range(2)]
            return Expr(self.random.choice(("add", "sub")), INT64, tuple(places))

        beside = const(self.random.choice((0, 1, -1, 2, 3, 4, 6, 9, 2**62, -(2**63))), INT64)
        args = (made(), self.choice((beside, Expr("add", INT64, (made(), beside)))))
        return Expr(self.random.choice(("eq", "ge", "gt")), BOOL, args)

    def literal(self, dtype: torch.dtype) -> Expr:
        value = self.random.choice(_REALS if dtype.is_floating_point else (0, 1, 2, 3, -1, -2))
        return const(abs(value) if dtype is torch.uint8 else value, dtype)

    def turned(self, a: Expr, b: Expr) -> tuple[Expr, Expr]:
        return (a, b) if self.random.random() < 0.5 else (b, a)

    def linear(self, dtype: torch.dtype) -> Expr:
        """Sums of multiples, some of them of a quotient and of what it leaves."""
        by = const(self.random.choice((2, 3, 5)), dtype)
        x = _cast(self.choice((Q, K)), dtype)
        part = Expr("mul", dtype, (Expr("floordiv", dtype, (x, by)), self.choice((by, const(3, dtype)))))
        found = self.choice((part, x, Expr("neg", dtype, (x,)), Expr("mul", dtype, (x, by))))
        for _ in range(self.random.randrange(1, 4)):
            more = self.choice((x, part, _cast(self.choice((Q, K, H)), dtype), self.literal(dtype)))
            more = more if self.random.random() < 0.6 or more.is_const else Expr("mul", dtype, (more, by))
            args = (found, more) if more.is_const else self.turned(found, more)
            found = Expr(self.random.choice(("add", "sub")), dtype, args)
        return self.choice((found, found, Expr("neg", dtype, (found,)), Expr("mul", dtype, (found, by))))

    def number(self, depth: int, dtype: torch.dtype) -> Expr:
        """Never a literal: PyTorch computes with two of them as Python does."""
        if depth <= 0 or self.random.random() < 0.1:
            return _cast(self.choice((Q, K, H)), dtype)
        x = self.number(depth - 1, dtype)
        other = self.choice((x, self.literal(dtype), self.literal(dtype), self.number(depth - 1, dtype)))
        match self.random.randrange(12):
            case 0 | 1:
                return Expr("where", dtype, (self.claim(depth - 1), x, other))
            case 9:  # the same condition twice
                condition = self.claim(0)
                inner = Expr("where", dtype, (condition, *self.turned(x, other)))
                return Expr("where", dtype, (condition, *self.turned(inner, self.number(depth - 1, dtype))))
            case 10 if dtype.is_floating_point:  # zeros of both signs
                zero = const(self.random.choice((0.0, -0.0)), dtype)
                x = Expr("mul", dtype, (x, const(-1.0, dtype)))
                return Expr(self.random.choice(("add", "sub")), dtype, self.turned(x, zero))
            case 10 | 11 if not dtype.is_floating_point and dtype is not torch.uint8:
                return self.linear(dtype)
            case 2:
                if dtype is torch.uint8:
                    return x
                return Expr(self.random.choice(("neg", "abs", "neg")), dtype, (x,))
            case 3 if dtype.is_floating_point:
                found = self.number(depth - 1, self.random.choice((*_INTEGERS, *_FLOATS)))
                return _cast(self.choice((found, self.claim(depth - 1))), dtype)
            case 3:
                found = self.number(depth - 1, self.random.choice(_INTEGERS))
                return _cast(self.choice((found, self.claim(depth - 1))), dtype)
            case 4:
                beside = self.choice((const(0, dtype), const(0, dtype), self.literal(dtype)))
                wheres = (self.claim(0), _cast(self.choice((Q, K)), dtype), beside)
                turned = wheres if self.random.random() < 0.5 else (wheres[0], *wheres[:0:-1])
                return Expr("mul", dtype, (Expr("where", dtype, turned), x))
            case _:
                op = self.random.choice((*_BOTH, "div") if dtype.is_floating_point else _OF_INTEGERS)
                if op in ("min", "max") and dtype.is_floating_point:
                    op = "add"  # of which zero it is, PyTorch says now this and now that
                if op in ("floordiv", "truncdiv", "mod", "shl", "shr"):
                    other = const(self.random.choice((1, 2, 3)), dtype)
                args = (x, other) if self.random.random() < 0.7 or not other.is_const else (other, x)
                return Expr(
                    op, dtype, args if op not in ("floordiv", "truncdiv", "mod", "shl", "shr") else (x, other)
                )


def small(seed: int) -> str | None:
    """A small expression that `make` simplifies is the same to the last bit."""
    made = _Small(seed)
    depth = made.random.choice((1, 2, 2, 3))
    raw = (
        made.claim(depth) if seed % 3 == 0 else made.number(depth, made.random.choice((*_INTEGERS, *_FLOATS)))
    )
    other = simplified(raw)
    return None if bool(same(_TEXT.value(raw), _TEXT.value(other)).all()) else f"{raw} became {other}"


def smalls(seed: int) -> str | None:
    """Eight of them: each takes half a millisecond."""
    return next(filter(None, map(small, range(8 * seed, 8 * seed + 8))), None)
