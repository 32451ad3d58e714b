"""Random expressions, operator by operator as a model computes them: no operand is simplified on the way.

`simplified` makes the same expression through `passes/score_mod/make.py`. Constants are literals, which PyTorch rounds
where it uses them; some are exactly what a dtype holds, some lie a hair beside it, some are at the ends of a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import torch

from kvcompile.expression import REDUCTIONS, Expr, H, K, Q, const, rebuilt
from kvcompile.passes.score_mod import make as built

BOOL, INT64 = torch.bool, torch.int64
INTEGERS = (
    torch.int64,
    torch.int64,
    torch.int64,
    torch.int32,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
FLOATS = (torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)
SMALL = (-7, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 12)
_AS_THEY_ARE = (*REDUCTIONS, "leaf", "softmax", "log_softmax", "nan_to_num")
# What rounds, overflows and vanishes: in one dtype or another.
_REALS = (
    *(0.0, -0.0, 0.5, 1.0, -1.0, 2.0, -2.5, 0.1, 1 / 3, 7.0, 8.0, 64.0, 0.125, -0.75, 3000.0, 1e-3),
    *(7.9999999999, 8.0000000001, 15.9996, 16.002, 255.99999999, 2.0**-30, 2.0**-140, 2.0**24, 1e30, 1e5),
)


class Drawn:
    """Expressions of one random generator. leaves: what else than positions may be at their ends."""

    def __init__(self, seed: int, leaves: tuple[Expr, ...] = (), wild: bool = True):
        self.random = Random(seed)
        self.leaves, self.wild = leaves, wild

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def one(self, *choices: str) -> str:
        return self.random.choice(choices)

    # Integers.

    def number(self, dtype: torch.dtype) -> Expr:
        ends = torch.iinfo(dtype)
        value = self.random.choice(SMALL)
        if self.wild and self.chance(0.12):
            value = 2 ** self.random.randrange(1, ends.bits) + self.random.choice((-1, 0, 1))
        return const(min(max(value, ends.min), ends.max), dtype)

    def place(self, dtype: torch.dtype) -> Expr:
        found = self.random.choice((Q, K, Q, K, H))
        if self.chance(0.3):
            found = Expr("sub", INT64, (Q, K))
        own = [leaf for leaf in self.leaves if leaf.dtype is dtype]
        if own and self.chance(0.4):
            return self.random.choice(own)
        return _cast(found, dtype)

    def integer(self, depth: int, dtype: torch.dtype = INT64) -> Expr:
        if depth == 0 or self.chance(0.1):
            return self.place(dtype)
        x = self.integer(depth - 1, dtype)
        signed = dtype is not torch.uint8

        def other() -> Expr:
            return self.number(dtype) if self.chance(0.5) else self.integer(depth - 1, dtype)

        def positive(*values: int) -> Expr:
            return const(self.random.choice(values), dtype)

        def made(op: str, *more: Expr) -> Expr:
            return Expr(op, dtype, (x, *more))

        match self.random.randrange(22):
            case 0 | 1 | 2:
                args = (x, other())
                return Expr("add", dtype, args if self.chance(0.5) else args[::-1])
            case 3 | 4:
                args = (x, other())
                return Expr("sub", dtype, args if self.chance(0.7) else args[::-1])
            case 5 | 6:
                by = self.number(dtype) if self.chance(0.85) else self.integer(depth - 1, dtype)
                return Expr("mul", dtype, (x, by) if self.chance(0.7) else (by, x))
            case 7 | 8:
                return made(self.one("floordiv", "floordiv", "truncdiv"), positive(1, 2, 3, 5, 7, 8, 64))
            case 9 | 10:
                return made("mod", positive(1, 2, 3, 5, 8, 64))
            case 11:
                by = positive(-1, -2, -5) if signed else positive(3)
                return made(self.one("floordiv", "mod", "truncdiv"), by)
            case 12:
                by = Expr("add", dtype, (Expr("abs", dtype, (_cast(K, dtype),)), const(1, dtype)))
                by = by if dtype in (INT64, torch.int32) else positive(2)
                return made(self.one("floordiv", "mod"), by)
            case 13:
                return made("shr", positive(0, 1, 2, 3, 6, 40) if self.wild else positive(0, 1, 2))
            case 14:
                return made("shl", positive(0, 1, 2, 5, 24, 29) if self.wild else positive(0, 1, 2))
            case 15:
                return made(self.one("and", "or", "xor"), positive(1, 3, 5, 7, 15, 63))
            case 16:
                return made(self.one("and", "or", "xor"), self.integer(depth - 1, dtype))
            case 17:
                return made(self.one("neg", "abs", "sign", "bitnot") if signed else "bitnot")
            case 18 | 19:
                return made(self.one("min", "max"), other())
            case 20:
                return Expr("where", dtype, (self.claim(depth - 1), x, other()))
            case _:
                return self.converted(depth, dtype)

    def converted(self, depth: int, dtype: torch.dtype) -> Expr:
        """An integer from another dtype; floats within int64 alone, as others become whatever the machine likes."""
        if self.chance(0.5):
            return _cast(self.integer(depth - 1, self.random.choice(INTEGERS)), dtype)
        kind = self.random.choice((torch.float32, torch.float64))
        x = _cast(self.integer(max(depth - 2, 0), INT64), kind)
        by = const(self.random.choice((0.5, 0.25, 2.0, 3.0, 1.5)), kind)
        x = Expr(self.one("mul", "div"), kind, (x, by))
        ends = torch.iinfo(dtype)
        if dtype is not INT64:
            x = Expr("max", kind, (x, const(float(ends.min // 2), kind)))
            x = Expr("min", kind, (x, const(float(ends.max // 2), kind)))
        else:
            x = Expr("max", kind, (x, const(-(2.0**61), kind)))
            x = Expr("min", kind, (x, const(2.0**61, kind)))
        return _cast(x, dtype)

    # Floats.

    def real(self, dtype: torch.dtype) -> Expr:
        value = self.random.choice(_REALS)
        if self.wild and self.chance(0.05):
            value = self.random.choice((math.inf, -math.inf, math.nan))
        if self.chance(0.3):
            value = float(self.random.choice(SMALL))
        if dtype is torch.float16 and math.isfinite(value) and abs(value) > 60000:
            value = 60000.0  # PyTorch takes no larger literals beside a half
        return const(value, dtype)

    def floating(self, depth: int, dtype: torch.dtype = torch.float32) -> Expr:
        if depth <= 0 or self.chance(0.15):
            own = [leaf for leaf in self.leaves if leaf.dtype is dtype]
            if own and self.chance(0.4):
                return self.random.choice(own)
            inner = self.integer(max(depth, 1), INT64)
            if self.chance(0.5):  # small enough for the halves to hold
                inner = Expr("mod", INT64, (inner, const(self.random.choice((5, 16, 17, 64, 300)), INT64)))
            return _cast(inner, dtype)
        x = self.floating(depth - 1, dtype)

        def other() -> Expr:
            return self.real(dtype) if self.chance(0.6) else self.floating(depth - 1, dtype)

        match self.random.randrange(16):
            case 0 | 1 | 2 | 3 | 4:
                args = (x, other())
                op = self.one("add", "sub", "mul", "mul")
                return Expr(op, dtype, args if self.chance(0.7) else args[::-1])
            case 5 | 6:
                args = (x, other())
                return Expr("div", dtype, args if self.chance(0.8) else args[::-1])
            case 7 | 8:  # of which zero it is, PyTorch says now this and now that
                by = (
                    self.real(dtype)
                    if self.chance(0.6)
                    else Expr("abs", dtype, (self.floating(depth - 1, dtype),))
                )
                x = Expr("abs", dtype, (x,)) if not by.is_const or not by.value else x
                return Expr(self.one("min", "max"), dtype, (x, by))
            case 9 | 10:
                return Expr(self.one("floor", "ceil", "trunc", "round", "neg", "abs", "sign"), dtype, (x,))
            case 11:
                return Expr(self.one("exp", "tanh", "sqrt", "reciprocal", "log", "rsqrt"), dtype, (x,))
            case 12:
                by = const(self.random.choice((2.5, 3.0, 0.5, 1.0, 7.0)), dtype)
                return Expr(self.one("mod", "floordiv"), dtype, (x, by))
            case 13:
                return Expr("where", dtype, (self.claim(depth - 1), x, other()))
            case _:
                return _cast(self.floating(depth - 1, self.random.choice(FLOATS)), dtype)

    # Truth values.

    def claim(self, depth: int) -> Expr:
        depth = max(depth, 0)
        match self.random.randrange(11):
            case 10:
                dtype = self.random.choice((INT64, INT64, torch.int32))
                args = (self.linear(dtype), self.linear(dtype))
                return Expr(self.one("eq", "ge", "gt"), BOOL, self._turned(args))
            case 0 | 1 | 2 | 3:
                dtype = self.random.choice(INTEGERS)
                args = (self.integer(depth, dtype), self._beside(lambda: self.integer(depth, dtype), dtype))
                return Expr(self.one("eq", "ge", "gt"), BOOL, self._turned(args))
            case 4 | 5 | 6:
                dtype = self.random.choice(FLOATS)
                args = (self.floating(depth, dtype), self._beside(lambda: self.floating(depth, dtype), dtype))
                return Expr(self.one("eq", "ge", "gt"), BOOL, self._turned(args))
            case 7 | 8 if depth:
                args = tuple(self.claim(depth - 1) for _ in range(2))
                return Expr(self.one("and", "or", "xor", "eq"), BOOL, args)
            case 9 if depth:
                return Expr("not", BOOL, (self.claim(depth - 1),))
            case _:
                return Expr(self.one("ge", "gt", "eq"), BOOL, (Q, K))

    def linear(self, dtype: torch.dtype) -> Expr:
        """A sum of places times numbers, some of them far too large."""
        found: Expr | None = None
        for _ in range(self.random.randrange(1, 4)):
            part = Expr("mul", dtype, (self.place(dtype), self.number(dtype)))
            if self.wild and self.chance(0.3):
                factor = self.random.randrange(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
                part = Expr("mul", dtype, (self.place(dtype), const(factor, dtype)))
            found = part if found is None else Expr(self.one("add", "sub"), dtype, (found, part))
        assert found is not None
        return Expr("add", dtype, (found, self.number(dtype)))

    def _beside(self, more: Callable[[], Expr], dtype: torch.dtype) -> Expr:
        if self.chance(0.4):
            return more()
        return self.real(dtype) if dtype.is_floating_point else self.number(dtype)

    def _turned(self, args: tuple[Expr, Expr]) -> tuple[Expr, Expr]:
        return args if self.chance(0.6) else args[::-1]


def _cast(e: Expr, dtype: torch.dtype) -> Expr:
    return e if e.dtype is dtype else Expr("cast", dtype, (e,))


def simplified(raw: Expr) -> Expr:
    """The same expression as the translation makes it."""

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if not args:
            return node
        if node.op in _AS_THEY_ARE:
            return Expr(node.op, node.dtype, args, node.value)
        if node.op == "cast":
            return built.cast(args[0], node.dtype)
        return built.make(node.op, node.dtype, *args)

    return rebuilt(raw, change)
