"""Classes are theorems: a mask or a value gets a fast path where it is proved to be one, for every query and key.

    causal       j <= i
    sliding(w)   j <= i and i - j < w
    chunked(c)   j <= i and i // c == j // c
    scale        a * s,  softcap  c * tanh(a * s / c),  ALiBi  + slope[h] * (j - i), slopes of weights alone

Candidates for w and c are the constants of the mask (and what follows from them); the proof says which is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcompile.expression import Expr, K, Q, const, integer, rebuilt, walk
from kvcompile.passes.score_mod.hiding import is_finite
from kvcompile.passes.score_mod.make import cast, equal, le, linear, lt, make, sub
from kvcompile.passes.score_mod.normal_form import summed, terms
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.passes.score_mod.weights import bare
from kvcompile.specs import MaskSpec

PAST, OWN = le(K, Q), equal(K, Q)


def sliding(window: int) -> Expr:
    return lt(sub(Q, K), integer(window))


def chunked(chunk: int) -> Expr:
    return equal(*(make("floordiv", torch.int64, place, integer(chunk)) for place in (Q, K)))


@dataclass(frozen=True)
class Masked:
    """mask: a class that holds wherever `rest` does not hide more; rest: what else hides, or None."""

    mask: MaskSpec
    rest: Expr | None


def mask_of(seen: Expr, prover: Prover) -> Masked:
    """The class of a mask that shows nothing of the future."""
    if prover.holds(seen, PAST):
        return Masked(MaskSpec("causal"), None)
    if seen.names & {"key", "pair"}:
        # What tokens bring along is kept for all of them: a window would be of no use.
        return Masked(MaskSpec("causal"), seen)
    numbers = _numbers(seen)
    # The smallest window that holds all that is seen; it may not be all that the mask is.
    bound = next((number for number in numbers if prover.holds(sliding(number), PAST, seen)), None)
    if bound is not None and prover.holds(seen, PAST, sliding(bound)):
        return Masked(MaskSpec("sliding", bound), None)
    for number in numbers:
        if prover.holds(chunked(number), PAST, seen) and prover.holds(seen, PAST, chunked(number)):
            return Masked(MaskSpec("chunked", number), None)
    return Masked(MaskSpec("causal") if bound is None else MaskSpec("sliding", bound), seen)


def _numbers(e: Expr) -> list[int]:
    """Candidates for a window or a chunk, in ascending order."""
    found: set[int] = set()
    for node in walk(e):
        if node.is_const and not node.is_bool and math.isfinite(node.value):
            found |= {math.floor(abs(node.value)), math.ceil(abs(node.value))}
        if node.op == "sum":
            found |= {abs(int(number)) for number in node.value}
    found |= {a * b for a in found for b in found if a * b < 2**20} if len(found) < 12 else set()
    return sorted({x + d for x in found for d in (-1, 0, 1) if 1 <= x + d < 2**22})


@dataclass(frozen=True)
class Valued:
    """What a score becomes: scale, softcap and ALiBi where they are proved; rest: all of it, where they are not."""

    sm_scale: float
    softcap: float | None = None
    slope: Expr | None = None  # of the head
    rest: Expr | None = None  # over `score`, which is then the raw product times sm_scale, capped


def value_of(value: Expr, with_sinks: bool, usual: float, prover: Prover) -> Valued:
    """The class of a value; usual: the scale that is meant where the value has it but for rounding."""
    of_score = [(factor, term) for factor, term in terms(value) if "score" in term.names]
    others = [(factor, term) for factor, term in terms(value) if "score" not in term.names]
    if len(of_score) != 1:
        return Valued(1.0, rest=value)
    factor, term = of_score[0]
    scale, cap = _scale(term), None
    if scale is None:
        capped = _softcap(term)
        if capped is None or factor < 0:
            return Valued(1.0, rest=value)
        scale, cap = capped
    scale *= factor
    scale = usual if math.isclose(scale, usual, rel_tol=1e-6) else scale
    if not others:
        return Valued(scale, cap)
    slope = _slope(others, with_sinks, prover)
    if slope is not None:
        return Valued(scale, cap, slope)
    score = Expr("score", torch.float32)
    return Valued(scale, cap, rest=summed([(1.0, score), *others]))


def _scale(e: Expr) -> float | None:
    """a of a * score."""
    if e.op == "score":
        return 1.0
    inner: float | None = None
    if e.op == "cast" and e.args[0].is_float:
        return _scale(e.args[0])
    if e.op == "neg":
        inner = _scale(e.args[0])
        return None if inner is None else -inner
    if e.op == "mul":
        for one, other in (e.args, e.args[::-1]):
            if one.is_const and math.isfinite(one.value):
                inner = _scale(other)
                return None if inner is None else inner * one.value
    if e.op == "div" and e.args[1].is_const and e.args[1].value:
        inner = _scale(e.args[0])
        return None if inner is None else inner / e.args[1].value
    return None


def _softcap(e: Expr) -> tuple[float, float] | None:
    """scale and cap of cap * tanh(scale / cap * score)."""
    e = bare(e)
    if e.op == "mul":
        for one, other in ((e.args[0], bare(e.args[1])), (e.args[1], bare(e.args[0]))):
            if one.is_const and one.value > 0 and other.op == "tanh":
                inner = _scale(other.args[0])
                # A cap that goes down with the score is none that kernels know.
                return None if inner is None or inner <= 0 else (inner * one.value, float(one.value))
    if e.op == "tanh":
        inner = _scale(e.args[0])
        return None if inner is None or inner <= 0 else (inner, 1.0)
    return None


def _slope(parts: list[tuple[float, Expr]], with_sinks: bool, prover: Prover) -> Expr | None:
    """slope[h] of terms that are slope[h] * (k - q), up to what a whole row shares (with sinks: exactly)."""
    if not all(is_finite(term) for _, term in parts):
        return None  # an infinity is not shared by a row, it ends it
    by_key = _coefficient(summed(parts), K, prover)
    if by_key is None or by_key.names - {"h", "leaf", "table"}:
        return None
    if with_sinks:
        by_query = _coefficient(summed(parts), Q, prover)
        if by_query is None or by_query is not make("neg", torch.float32, by_key):
            return None
        offset = _at_zero(summed(parts))
        if offset is None or not (offset.is_const and offset.value == 0):
            return None
    return by_key


def _coefficient(e: Expr, variable: Expr, prover: Prover) -> Expr | None:
    """The factor of a variable in an expression that is linear in it, float32; None where it is not."""
    zero = const(0, torch.float32)
    if variable.op not in e.names:
        return zero
    while e.is_int and e.op == "cast" and e.args[0].is_int and prover.exact(e) is not None:
        e = e.args[0]
    if e.is_int:
        if prover.exact(e) is None:
            return None  # it may wrap
        _, factors = linear(e)
        if any(variable.op in term.names for term in factors if term is not variable):
            return None
        return const(factors.get(variable, 0), torch.float32)
    if e.dtype not in (torch.float32, torch.float64):
        return None  # it is rounded on the way
    parts = [_coefficient(arg, variable, prover) for arg in e.args]
    if any(part is None for part in parts):
        return None
    match e.op, parts:
        case "cast", [Expr() as part]:
            return part
        case "neg", [Expr() as part]:
            return make("neg", torch.float32, part)
        case "add" | "sub", [Expr() as a, Expr() as b]:
            return make(e.op, torch.float32, a, b)
        case "mul", [Expr() as a, Expr() as b]:
            for own, other in ((a, e.args[1]), (b, e.args[0])):
                if variable.op not in other.names:
                    return make("mul", torch.float32, own, cast(other, torch.float32))
        case "div", [Expr() as a, Expr()] if variable.op not in e.args[1].names:
            return make("div", torch.float32, a, cast(e.args[1], torch.float32))
    return None


def _at_zero(e: Expr) -> Expr | None:
    """What is left of a linear expression where q and k are 0."""

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op in ("q", "k"):
            return integer(0)
        if node.op == "sum":
            found = integer(node.value[0])
            for factor, arg in zip(node.value[1:], args, strict=True):
                found = make(
                    "add", node.dtype, found, make("mul", node.dtype, arg, const(factor, node.dtype))
                )
            return found
        if node.op == "cast":
            return cast(args[0], node.dtype)
        if node.op == "mul" and any(arg.is_const and arg.value == 0 for arg in args):
            return const(0, node.dtype)
        if not args:
            return node
        if node.op == "leaf":
            return Expr("leaf", node.dtype, args, node.value)
        return make(node.op, node.dtype, *args)

    return rebuilt(e, change)
