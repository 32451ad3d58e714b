"""Disturbed runs side by side, as rows of one, are the runs that each of them would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcompile.pipeline import plan_for, understand
from kvcompile.recipe import Recipe
from kvcompile.verify import oracle
from kvcompile.verify.runs import Run, probe
from tests.support.models import tiny_hf

TOKENS = 9


def runs(recipe: str, monkeypatch: pytest.MonkeyPatch, together: int) -> tuple[list[Run], int]:
    """The undisturbed run and two disturbed ones, and how often the graph ran."""
    front = understand(tiny_hf("llama"))
    plan = plan_for(front, Recipe.load(recipe, max_tokens=64))
    ids, pads = probe(front, TOKENS)
    count = 0
    original = oracle.Oracle._run_on

    def counted(self: oracle.Oracle, *args: Any) -> Run:
        nonlocal count
        count += 1
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(oracle, "_TOGETHER", together)
        patched.setattr(oracle.Oracle, "_run_on", counted)
        plain, noisy = oracle.oracles(front, plan, {}, ids, pads, disturbed=2)
    return [plain, *noisy], count


@pytest.mark.parametrize("recipe", ["baseline", "int8"])
def test_side_by_side_as_alone(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, once = runs(recipe, monkeypatch, 1 << 10)
    apart, thrice = runs(recipe, monkeypatch, 0)
    assert (once, thrice) == (1, 3)
    for one, other in zip(together, apart, strict=True):
        assert len(one.sites) == len(other.sites) > 0
        pairs = zip((one.logits, *one.sites), (other.logits, *other.sites), strict=True)
        for a, b in pairs:
            assert a.shape == b.shape
            assert torch.allclose(a, b, rtol=0, atol=float(b.abs().max()) * 1e-5)
    moved = [float((run.logits - together[0].logits).abs().max()) for run in together[1:]]
    assert min(moved) > 0 and not torch.equal(together[1].logits, together[2].logits)


def test_choices_by_scores_belong_to_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    front = understand(tiny_hf("llama"))
    scored, plain = (
        plan_for(front, Recipe.load(recipe, max_tokens=64, **changes))
        for recipe, changes in (
            ("h2o", {"cache": {"retention": {"heavy": 8, "recent": 9}}}),
            ("baseline", {}),
        )
    )
    assert oracle._side_by_side(front, plain, oracle._TOGETHER)
    assert not oracle._side_by_side(front, plain, oracle._TOGETHER + 1)
    assert not oracle._side_by_side(front, scored, 1)
