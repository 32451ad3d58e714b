"""An operator of masks and biases that is added by its rule has everything: translation, evaluation, verification.

It does what the section "Add a score operator" of CONTRIBUTING.md says, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

import kvcompile
from kvcompile.errors import DetectionError
from kvcompile.expression import Expr
from kvcompile.kernels.cpp.attend.expression import refusal as cpp_refusal
from kvcompile.kernels.shared.expression import OPERATORS
from kvcompile.kernels.triton.tile.expression import refusal as triton_refusal
from kvcompile.passes.score_mod.make import make
from kvcompile.passes.score_mod.rules import RULES
from kvcompile.passes.score_mod.translate import Places, Translator
from tests.passes.score_mod import test_score_mod
from tests.passes.score_mod.test_masks import DIM, Attend, One

NAME = "kvtest_score::wave"


@torch.library.custom_op(NAME, mutates_args=())
def wave(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x), as antialiasing filters have it."""
    return torch.sinc(x)


@torch.library.custom_op("kvtest_score::sin", mutates_args=())
def sin(x: Tensor) -> Tensor:
    """Another function than PyTorch's of the same name."""
    return x * x * -0.01


for operator in (wave, sin):
    operator.register_fake(torch.empty_like)


def of_wave(t: Translator, node: Node, places: Places) -> Expr:
    """The element of the result from that of the operand."""
    return make("sinc", torch.float32, t.operand(node, node.args[0], places, torch.float32))


def of_another(t: Translator, node: Node, places: Places) -> Expr:
    """A wrong one."""
    return make("cos", torch.float32, t.operand(node, node.args[0], places, torch.float32))


def biased(function: Callable[[Tensor], Tensor]) -> Attend:
    """Causal attention with a function of the distance added to its scores."""

    def attend(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2])
        distance = position[:, None] - position
        scores = q @ k.transpose(-1, -2) * DIM**-0.5 + function(distance / 4)
        return scores.masked_fill(distance < 0, -math.inf).softmax(-1) @ v

    return attend


RECIPE = {"cache": {"keys": {"dtype": "model"}}, "compile": {"mode": "none"}}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule, and its evaluation under the name that the rule gives it."""
    monkeypatch.setitem(RULES, NAME, of_wave)
    monkeypatch.setitem(OPERATORS, "sinc", torch.sinc)


def test_a_new_operator_is_refused_without_its_rule() -> None:
    with pytest.raises(DetectionError, match=r"through kvtest_score\.wave\.default"):
        kvcompile.optimize(One(biased(wave)).eval(), RECIPE, max_tokens=64)


def test_a_new_operator_needs_its_rule_and_its_evaluation(added: None) -> None:
    model = One(biased(wave)).eval()
    fast = kvcompile.optimize(model, RECIPE, max_tokens=64)  # which verifies it
    (decision,) = fast.plan.decisions
    mod = decision.score.mod
    # An expression of positions, at any length.
    assert mod is not None and "sinc" in str(mod) and not mod.leaves
    for refusal in (triton_refusal, cpp_refusal):
        assert "sinc" in str(refusal(mod))  # generated kernels say that they have no word for it
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cached = torch.cat([fast(ids[:, :20]), *(fast(ids[:, i : i + 1]) for i in range(20, 24))], dim=1)
        torch.testing.assert_close(cached, model(ids), rtol=1e-4, atol=1e-5)


def test_an_operator_that_is_only_named_alike_is_another() -> None:
    assert "sin" in RULES
    with pytest.raises(DetectionError, match=r"through kvtest_score\.sin\.default"):
        kvcompile.optimize(One(biased(sin)).eval(), RECIPE, max_tokens=64)


def test_property_tests_check_it(added: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_score_mod, "CASES", {"wave": lambda g: wave(g.f / 9) + g.f})
    graph = test_score_mod.Graph()
    assert graph.holds("wave", RULES)
    assert not graph.holds("wave", RULES | {NAME: of_another})
