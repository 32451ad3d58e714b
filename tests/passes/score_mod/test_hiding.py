"""What hides a key whatever its score, and what does not: numbers next to the largest that a dtype has."""

from __future__ import annotations

import math

import pytest
import torch

from kvcompile.expression import SCORE, TRUE, Expr, K, Q, const
from kvcompile.passes.score_mod.hiding import is_finite, is_infinite, reach
from kvcompile.passes.score_mod.make import le, make
from kvcompile.passes.score_mod.normal_form import _without_row_terms
from kvcompile.passes.score_mod.ranges import LONGEST

F32, F16 = torch.float32, torch.float16
LEAST = torch.finfo(F32).min


def masked(by: float, dtype: torch.dtype = F32) -> Expr:
    """What is added to a score that is masked: the score is 0 here."""
    return make(
        "add", dtype, const(0.0, dtype), make("where", dtype, le(K, Q), const(by, dtype), const(by, dtype))
    )


def scaled(e: Expr, op: str, by: float) -> Expr:
    return Expr(op, e.dtype, (e, const(by, e.dtype)))


@pytest.mark.parametrize(
    "value",
    [
        scaled(masked(LEAST), "div", 8.0**0.5),  # CodeGen divides what is masked
        scaled(masked(LEAST), "mul", 0.125),
        scaled(masked(-1e9), "div", 64.0),
        Expr("cast", F16, (const(LEAST, F32),)),
    ],
)
def test_it_hides(value: Expr) -> None:
    assert reach(value) == LONGEST


def test_an_overflowing_cast_is_infinite() -> None:
    assert is_infinite(Expr("cast", F16, (const(LEAST, F32),)))
    assert not is_infinite(Expr("cast", F16, (const(-6e4, F32),)))


@pytest.mark.parametrize(
    "value",
    [
        scaled(const(LEAST, F32), "mul", 8.0),  # -inf, or as good as that: not known to be a number
        scaled(scaled(const(LEAST, F32), "mul", 1e10), "div", 1e10),
        scaled(Expr("log", F32, (const(-1.0, F32),)), "mul", 1e-37),
        scaled(Expr("add", F32, (Expr("log", F32, (const(-1.0, F32),)), const(LEAST, F32))), "div", 2.0),
    ],
)
def test_of_what_nothing_is_known_nothing_is_said(value: Expr) -> None:
    assert reach(value) == 0 and not is_finite(value)


def test_a_sum_of_both_infinities_is_no_number() -> None:
    lost = Expr("cast", F16, (const(LEAST, F32),))
    with pytest.raises(ValueError, match="no number"):
        reach(Expr("sub", F16, (lost, const(-math.inf, F16))))


def test_what_a_row_shares_goes_only_where_it_is_a_number() -> None:
    """A softmax of inf + score is no number, and one of score is: the same term may not be taken out of each key."""
    shared = make("cast", F32, Q)
    for term, gone in ((shared, True), (Expr("log", F32, (shared,)), False)):  # log(0) in the first row
        cases, _ = _without_row_terms([(TRUE, make("add", F32, SCORE, term))], None)
        assert (cases == [(TRUE, SCORE)]) == gone
