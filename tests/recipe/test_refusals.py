"""What the docs say is refused is refused, with that reason; what they say works can be planned and is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcompile.errors import RecipeError
from kvcompile.layouts import CacheLayout
from kvcompile.recipe import Recipe
from tests.support.refusals import (
    PLACEMENTS,
    RETENTIONS,
    RULES,
    STORAGES,
    Refusal,
    product,
    product_table,
    rules_table,
)

DOCS = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text("utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.what)
def test_every_rule_refuses_its_recipe(rule: Refusal) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load(dict(rule.recipe))
    assert len(caught.value.problems) == 1, caught.value.problems
    assert rule.says in caught.value.problems[0]


def test_the_docs_have_what_the_code_says() -> None:
    for made in (rules_table(), product_table()):
        assert made in DOCS, f"docs/recipes.md must have this (python -m tests.support.refusals):\n{made}"


def test_the_product_is_whole() -> None:
    rows = list(product())
    assert len(rows) == len(STORAGES) * len(PLACEMENTS) * len(RETENTIONS)
    for _, placement, retention, problem in rows:
        if problem is not None:
            assert len(problem) > 40, f"{placement} x {retention}: {problem} says too little"
    # Every retention has a placement that frees what it forgets, and one in pages.
    for name, retention in RETENTIONS:
        allowed = [p for _, p in PLACEMENTS if CacheLayout(placement=p, retention=retention).check() is None]
        assert len(allowed) >= 2, name
