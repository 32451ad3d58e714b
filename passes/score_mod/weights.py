"""What weighs the values, as a softmax: found in an expression by its form, however the softmax is spelled.

softmax(x);  exp(log_softmax(x));  exp(x - logsumexp(x));  exp(x) / sum(exp(x))
exp(x) / (sum(exp(x)) + exp(s))     a sink s
p * w,  where(c, p, 0)              a factor of each probability
p * w / (sum(p * w) + eps)          renormalised (adaptive spans: Sukhbaatar et al. 2019)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kvcompile.expression import Expr, const
from kvcompile.passes.score_mod.make import cast, make, where

_ROUNDING = 2.0**-24  # of a sum of probabilities, which is 1


class NoSoftmax(Exception):
    """What weighs the values is no softmax."""


@dataclass(frozen=True)
class Weights:
    """Probabilities softmax([body, sink])[keys] times weight, perhaps divided by their sum + renormalise.

    zeros: whether rows that see nothing are made 0
    """

    body: Expr
    sink: Expr | None = None
    weight: Expr | None = None
    renormalise: float | None = None
    zeros: bool = False


def weights_of(e: Expr) -> Weights:
    """The softmax in what weighs the values; raises NoSoftmax."""
    if e.op == "cast" and e.is_float:
        return weights_of(e.args[0])
    match e.op:
        case "softmax":
            return _softmax(e)
        case "nan_to_num":
            return replace(weights_of(e.args[0]), zeros=True)
        case "exp":
            return _exponential(bare(e.args[0]))
        case "where":
            condition, yes, no = e.args
            zero = [arg for arg in (yes, no) if arg.is_const and arg.value == 0]
            if len(zero) == 1:
                one = const(1, torch.float32)
                nothing = const(0, torch.float32)
                factor = where(condition, nothing, one) if zero[0] is yes else where(condition, one, nothing)
                return _weighed(no if zero[0] is yes else yes, factor)
        case "mul":
            for one, other in (e.args, e.args[::-1]):
                if "reduction" in one.names and "reduction" not in other.names:
                    return _weighed(one, other)
        case "div":
            return _quotient(*e.args)
    raise NoSoftmax


def _softmax(e: Expr) -> Weights:
    """Of a softmax, or a log_softmax: over a body, and perhaps one more column."""
    body, *sinks = e.args
    return Weights(body, sinks[0] if sinks else None)


def bare(e: Expr) -> Expr:
    """Without casts between floats."""
    while e.op == "cast" and e.is_float and e.args[0].is_float:
        e = e.args[0]
    return e


def _weighed(e: Expr, factor: Expr) -> Weights:
    inner = weights_of(e)
    if "score" in factor.names or inner.renormalise is not None:
        # What is divided by its sum forgets a factor.
        raise NoSoftmax
    factor = cast(factor, torch.float32)
    return replace(
        inner, weight=factor if inner.weight is None else make("mul", torch.float32, inner.weight, factor)
    )


def _exponential(x: Expr) -> Weights:
    """exp of a logarithm of probabilities."""
    if x.op == "log_softmax":
        return _softmax(x)
    if x.op == "sub":
        body, total = (bare(arg) for arg in x.args)
        if total.op == "reduce_lse" and bare(total.args[0]) is body:
            return Weights(body)
    raise NoSoftmax


def _quotient(top: Expr, bottom: Expr) -> Weights:
    top, bottom = bare(top), bare(bottom)
    if bottom.is_const and bottom.value and "reduction" in top.names and top.op != "exp":
        return _weighed(top, const(1 / bottom.value, torch.float32))
    if bottom.op == "mul":
        for one, other in (bottom.args, bottom.args[::-1]):
            if one.is_const and one.value:
                return _weighed(make("div", torch.float32, top, other), const(1 / one.value, torch.float32))
    parts = [bare(part) for part in _summands(bottom)]
    sums = [part for part in parts if part.op == "reduce_sum" and bare(part.args[0]) is top]
    if len(sums) != 1:
        raise NoSoftmax
    extra = [part for part in parts if part is not sums[0]]
    if top.op == "exp":
        found = _over_exponentials(bare(top.args[0]), extra)
        if found is not None:
            return found
    if any(not part.is_const for part in extra):
        raise NoSoftmax
    inner = weights_of(top)
    if inner.renormalise is not None:
        raise NoSoftmax
    return replace(
        inner,
        weight=inner.weight or const(1, torch.float32),
        renormalise=float(sum(part.value for part in extra)),
    )


def _summands(e: Expr) -> list[Expr]:
    e = bare(e)
    return _summands(e.args[0]) + _summands(e.args[1]) if e.op == "add" else [e]


def _over_exponentials(x: Expr, extra: list[Expr]) -> Weights | None:
    """exp(x) / (sum(exp(x)) + extra)."""
    if not extra:
        return Weights(x)
    if len(extra) != 1:
        return None
    (part,) = extra
    if part.op == "exp":
        sink = bare(part.args[0])
        return None if sink.names & {"k", "score"} else Weights(x, sink)
    if part.is_const and part.value > 0:
        largest = x.op == "sub" and bare(x.args[1]).op == "reduce_max"
        if part.value <= _ROUNDING and largest and bare(bare(x.args[1]).args[0]) is bare(x.args[0]):
            return Weights(x)  # the sum is 1 at least
        return Weights(x, const(math.log(part.value), torch.float32))
    return None
