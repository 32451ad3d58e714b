"""Proofs: what holds of an expression for every query, key, head and length, by z3.

Integers are z3's; a float is a real number where its operation is exact (`passes/score_mod/ranges.py`), for texts of up
to `LONGEST` tokens. Everything else (weights, activations, functions of them, what rounds or wraps) is a function of
which nothing is known but that equal arguments give equal values. So what is proved holds whatever those are; what is
not proved is not used.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import z3

from kvcompile.expression import FALSE, REDUCTIONS, TRUE, Expr
from kvcompile.passes.score_mod.make import not_, rounded
from kvcompile.passes.score_mod.ranges import LONGEST, Exact, Ranges, negative_zero

# Steps of the solver, which are the same on every machine; what takes more is not proved.
_STEPS = 3_000_000


class Prover:
    """Proofs about expressions of one attention block's heads."""

    def __init__(self, num_heads: int = 2**31, channels: int = 1):
        names = ("q", "k", "n", "h", "b", "nb", "r")
        self.q, self.k, self.n, self.h, self.b, self.nb, self.r = z3.Ints(" ".join(names))
        self._variables = dict(
            zip(names, (self.q, self.k, self.n, self.h, self.b, self.nb, self.r), strict=True)
        )
        self.facts = [
            self.q >= 0,
            self.k >= 0,
            self.n <= LONGEST,
            self.q < self.n,
            self.k < self.n,
            self.h >= 0,
            self.h < num_heads,
            self.b >= 0,
            self.b < self.nb,
            self.r >= 0,
            self.r < channels,
        ]
        self._terms: dict[Expr, Any] = {}
        self._alone = itertools.count()  # numbers of functions that no two expressions share
        self._ranges = Ranges()
        self._known: dict[tuple[Expr, tuple[Expr, ...]], bool] = {}
        self._keep: list[Expr] = []  # expressions are found again by what they are, so they must live on

    def holds(self, claim: Expr, *given: Expr) -> bool:
        """Whether `claim` is true wherever all of `given` are; False: not proved."""
        if claim.is_const:
            return bool(claim.value)
        key = (claim, given)
        if key not in self._known:
            self._keep += [claim, *given]
            self._known[key] = self.counterexample(claim, *given) is None
        return self._known[key]

    def never(self, claim: Expr, *given: Expr) -> bool:
        """Whether `claim` is false wherever all of `given` are true."""
        return self.holds(not_(claim), *given)

    def counterexample(self, claim: Expr, *given: Expr) -> dict[str, int] | None:
        """Where `claim` is not true though all of `given` are: values of the variables; empty: not known where."""
        solver = z3.Solver()
        solver.set("rlimit", _STEPS)
        solver.add(*self.facts, *(self.term(e) for e in given), z3.Not(self.term(claim)))
        found = solver.check()
        if found == z3.unsat:
            return None
        if found == z3.unknown:
            return {}
        model = solver.model()
        return {
            name: model.eval(var, model_completion=True).as_long() for name, var in self._variables.items()
        }

    def some_key(self, seen: Expr) -> bool:
        """Whether every query sees some key that is not later than it."""
        key = (seen, (FALSE,))
        if key not in self._known:
            self._keep.append(seen)
            solver = z3.Solver()
            solver.set("rlimit", _STEPS)
            facts = [fact for fact in self.facts if not _mentions(fact, self.k)]
            past = z3.And(self.k >= 0, self.k <= self.q)
            solver.add(*facts, z3.ForAll([self.k], z3.Implies(past, z3.Not(self.term(seen)))))
            self._known[key] = solver.check() == z3.unsat
        return self._known[key]

    def decided(self, claim: Expr) -> Expr:
        """The claim, or TRUE or FALSE where that is what it always is."""
        if claim.is_const or not _positional(claim):
            return claim
        if self.holds(claim):
            return TRUE
        return FALSE if self.never(claim) else claim

    # Terms.

    def term(self, e: Expr) -> Any:
        if e not in self._terms:
            self._keep.append(e)
            self._terms[e] = self._term(e)
        return self._terms[e]

    def _term(self, e: Expr) -> Any:
        if e.op in self._variables:
            return self._variables[e.op]
        if e.is_const:
            return self._const(e)
        if e.op == "leaf":
            return self._leaf(e)
        if e.op == "score":  # another one for each pair
            return self._function("score", e, [self.q, self.k, self.h, self.b])
        if e.op in REDUCTIONS or e.op in ("softmax", "log_softmax"):
            return self._of_row(e)
        args = [self.term(arg) for arg in e.args]
        if e.is_bool:
            return self._claim(e, args)
        if e.op == "where":
            return z3.If(args[0], args[1], args[2])
        if e.is_int:
            found = self._integer(e, args) if self._holds_it(e) else None
            return self._unknown(e) if found is None else found
        if self.exact(e) is not None:
            found = self._exact(e, args)
            if found is not None:
                return found
        return self._unknown(e)

    def _const(self, e: Expr) -> Any:
        if e.is_bool:
            return z3.BoolVal(e.value)
        if e.is_int:
            return z3.IntVal(e.value)
        if not math.isfinite(e.value):
            return z3.Real(f"const {e.value}")
        return z3.RealVal(z3.Q(*float(e.value).as_integer_ratio()))

    def _leaf(self, e: Expr) -> Any:
        """The same function of the token for what a query and a key bring along."""
        pair = [self.q, self.k]
        if e.value.kind == "pair" and e.value.dims[1] > e.value.dims[2]:  # in the order of its dimensions
            pair.reverse()
        places = {"query": [self.q], "key": [self.k], "pair": pair, "table": []}[e.value.kind]
        return self._function(f"leaf {e.value.name} {e.dtype}", e, [*places, *map(self.term, e.args)])

    def _unknown(self, e: Expr) -> Any:
        extra = f" {e.value}" if e.value is not None else ""
        kinds = " ".join(str(arg.dtype) for arg in e.args)
        # 0.0 and -0.0 are one number here, and not to a division: then it is a function of its own.
        own = f" {next(self._alone)}" if any(self._signed(arg) for arg in e.args) else ""
        name = f"{e.op} {e.dtype}{extra} of {kinds}{own}"
        return self._function(name, e, [self.term(arg) for arg in e.args])

    def _signed(self, e: Expr) -> bool:
        """Whether a real number stands for what may be -0.0."""
        known = e.is_float and (e.is_const or e.op == "where" or self.exact(e) is not None)
        return known and negative_zero(e)

    def _of_row(self, e: Expr) -> Any:
        """A function of all keys of a row: its own, as operands that are equal at one key need not be at others."""
        return self._function(
            f"{e.op} {next(self._alone)}", e, [self.q, self.n, self.h, self.b, self.nb, self.r]
        )

    def _function(self, name: str, e: Expr, args: list[Any]) -> Any:
        sort = z3.BoolSort() if e.is_bool else z3.IntSort() if e.is_int else z3.RealSort()
        if not args:
            return z3.Const(name, sort)
        return z3.Function(name, *(arg.sort() for arg in args), sort)(*args)

    def _claim(self, e: Expr, args: list[Any]) -> Any:
        match e.op:
            case "and":
                return z3.And(*args)
            case "or":
                return z3.Or(*args)
            case "not":
                return z3.Not(args[0])
            case "xor":
                return z3.Xor(args[0], args[1])
            case "eq" | "ge" | "gt":
                a, b = args
                if any(arg.is_float and not self._comparable(arg) for arg in e.args):
                    return self._unknown(e)  # nan compares as nothing else does
                return a == b if e.op == "eq" else a >= b if e.op == "ge" else a > b
            case _:
                return self._unknown(e)

    def _comparable(self, e: Expr) -> bool:
        """Whether comparing it is comparing numbers; what stands here is not rounded, unlike a literal."""
        return self.exact(e) is not None or (e.is_const and math.isfinite(e.value) and rounded(e) is e)

    def exact(self, e: Expr) -> Exact | None:
        """The range of an expression's values where they are computed without rounding or wrapping."""
        return self._ranges.exact(e)

    def _holds_it(self, e: Expr) -> bool:
        """Whether an integer surely fits its dtype."""
        wraps = e.op in ("sum", "add", "sub", "mul", "neg", "shl", "cast", "abs")
        return not wraps or self.exact(e) is not None

    def _integer(self, e: Expr, args: list[Any]) -> Any:
        by = e.args[1].value if len(e.args) == 2 and e.args[1].is_const else None
        match e.op:
            case "sum":
                return z3.Sum(
                    [
                        z3.IntVal(e.value[0]),
                        *(factor * arg for factor, arg in zip(e.value[1:], args, strict=True)),
                    ]
                )
            case "add" | "sub" | "mul" | "neg":
                if e.op == "mul" and not any(arg.is_const for arg in e.args):
                    return None  # products of variables are beyond what is decided quickly
                return {
                    "add": lambda: args[0] + args[1],
                    "sub": lambda: args[0] - args[1],
                    "mul": lambda: args[0] * args[1],
                    "neg": lambda: -args[0],
                }[e.op]()
            case "floordiv" if by is not None and by > 0:
                return args[0] / z3.IntVal(by)
            case "truncdiv" if by is not None and by > 0:
                return z3.If(args[0] >= 0, args[0] / z3.IntVal(by), -((-args[0]) / z3.IntVal(by)))
            case "mod" if by is not None and by > 0:
                return args[0] % z3.IntVal(by)
            case "shr" if by is not None and 0 <= by < 63:
                return args[0] / z3.IntVal(2**by)
            case "shl" if by is not None and 0 <= by < 31:
                return args[0] * z3.IntVal(2**by)
            case "and" if by is not None and by >= 0 and not by & (by + 1):
                return args[0] % z3.IntVal(by + 1)
            case "min":
                return z3.If(args[0] <= args[1], args[0], args[1])
            case "max":
                return z3.If(args[0] >= args[1], args[0], args[1])
            case "abs":
                return z3.If(args[0] >= 0, args[0], -args[0])
            case "sign":
                return z3.If(args[0] > 0, z3.IntVal(1), z3.If(args[0] < 0, z3.IntVal(-1), z3.IntVal(0)))
            case "cast" if e.args[0].is_float and self.exact(e.args[0]) is not None:
                whole = z3.ToInt(args[0])
                return z3.If(args[0] >= 0, whole, -z3.ToInt(-args[0]))
            case "cast" if e.args[0].is_int:
                return args[0]
        return None

    def _exact(self, e: Expr, args: list[Any]) -> Any:
        match e.op:
            case "cast":
                return args[0] if e.args[0].is_float else z3.ToReal(args[0])
            case "add":
                return args[0] + args[1]
            case "sub":
                return args[0] - args[1]
            case "mul":
                return args[0] * args[1] if any(arg.is_const for arg in e.args) else None
            case "div":
                return args[0] / args[1]
            case "neg":
                return -args[0]
            case "abs":
                return z3.If(args[0] >= 0, args[0], -args[0])
            case "min":
                return z3.If(args[0] <= args[1], args[0], args[1])
            case "max":
                return z3.If(args[0] >= args[1], args[0], args[1])
            case "sign":
                return z3.If(args[0] > 0, z3.RealVal(1), z3.If(args[0] < 0, z3.RealVal(-1), z3.RealVal(0)))
            case "floor":
                return z3.ToReal(z3.ToInt(args[0]))
            case "ceil":
                return -z3.ToReal(z3.ToInt(-args[0]))
            case "trunc":
                return z3.If(args[0] >= 0, z3.ToReal(z3.ToInt(args[0])), -z3.ToReal(z3.ToInt(-args[0])))
        return None


def _positional(e: Expr) -> bool:
    """Whether an expression is of positions and lengths alone, so that it may always be one thing."""
    return not e.names & {"leaf", "score", "reduction"}


def _mentions(term: Any, variable: Any) -> bool:
    return bool(term.eq(variable)) or any(_mentions(child, variable) for child in term.children())
