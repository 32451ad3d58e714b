"""The cases of the model are those of the benchmarks, and each goal can be made of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.predict.cases import CASES, Case, launches_of, time_of
from kvcompile.kernels.triton.predict.goals import GOALS, Figure
from kvcompile.kernels.triton.predict.launch import predicted
from kvcompile.kernels.triton.predict.recorded import Shape, recorded
from kvcompile.kernels.triton.predict.step import STEPS
from kvcompile.recipe import load_recipe
from kvcompile.recipe.retention import LayerContext
from kvcompile.specs import RotaryForm
from tests.support.kernel_specs import of_recipes
from tests.support.predicted import H200, fact

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[ModuleType]:
    found = importlib.util.spec_from_file_location("kernel_cases", BENCHMARKS / "kernel_cases.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["kernel_cases"] = module
    found.loader.exec_module(module)
    yield module
    del sys.modules["kernel_cases"]


def test_cases_are_those_that_are_measured(benchmarks: ModuleType) -> None:
    own = {case.name: case for case in CASES}
    measured = {case.name: case for case in (*benchmarks.CASES, *benchmarks.APPENDS)}
    assert set(own) <= set(measured)
    for name, case in ((name, measured[name]) for name in own):
        shape, site = own[name].shape, own[name].shape.site
        cache = {key: dict(value) for key, value in case.cache.items()}
        recipe = load_recipe({"name": "bench", "cache": cache})
        layout = recipe.cache_for(0, 1, "causal")[0].build(LayerContext(tokens=max(case.lengths)))
        assert site.layout == layout, name
        assert (list(shape.lengths), shape.heads, shape.dims) == (
            case.lengths,
            case.heads,
            (case.dim, case.dim),
        )
        assert site.mask.window == case.window
        scores = {"softcap": site.score.softcap, "alibi": site.score.bias, "sinks": site.score.sinks}
        assert [key for key, value in scores.items() if value] == ([case.score] if case.score else [])
        assert (own[name].only == "append") == name.startswith("append")
        assert (site.share == "none") == (case.append or name.startswith("append"))
    assert benchmarks.GOALS is GOALS


def test_each_goal_is_made_of_cases() -> None:
    figures = {name: Figure(10.0, 1, 0.5) for name in (*(case.name for case in CASES), *STEPS)}
    values = [goal.value(figures) for goal in GOALS]
    assert {goal.number for goal in GOALS} == set(range(1, 11))
    assert values == [0.5, 10.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 10.0, 0.5, 0.5]
    assert GOALS[0].met(0.92) and not GOALS[0].met(0.91)
    assert GOALS[1].met(39.0) and not GOALS[1].met(39.1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_case_launches(case: Case) -> None:
    made = launches_of(case, H200.machine)
    roles = [one.spec.role for one in made]
    assert roles == ["append"] if case.only else roles.count("decode") == 1
    assert ("rope" in made[0].spec.options) == bool(case.only)
    # Attention alone but for the two that write; and what notes scores is measured.
    assert ("append" in roles) == (case.only == "append" or "slots" in case.name)
    if "h2o" in case.name:
        assert "logits" in next(one for one in made if one.spec.role == "decode").spec.options
    found = time_of(case, made, {one.request: fact(registers=64, shared=20_000) for one in made}, H200)
    assert found.seconds > 0 and 0 < found.share < 1 and len(found.launches) == len(made)


@pytest.mark.parametrize("name", [name for name, _ in of_recipes()])
def test_every_launch_of_every_recipe_has_a_prediction(name: str) -> None:
    """A step, and a prompt behind other tokens: no role is forgotten. The facts are made up."""
    layout = dict(of_recipes())[name]
    for tokens in (1, 64):
        site = SiteSpec(layout, 128**-0.5, rotary=RotaryForm("half", 0, 128))
        of = Shape(site, (32, 8), (128, 128), torch.bfloat16, (40_000, 50_000), tokens)
        made = recorded(of, H200.machine)
        found = predicted(made, of, {one.request: fact(registers=64, shared=20_000) for one in made}, H200)
        assert len(found) == len(made) > 0
        for one in found:
            assert one.seconds > H200.assumed.launch and one.bytes > 0 and one.programs > 0, one.role
