"""Models whose scores are expressions, by C++ kernels: as they are, compiled, and as a package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile import api
from kvcompile.pipeline import understand
from kvcompile.recipe import Recipe
from kvcompile.targets.aoti.session import Package
from tests.passes.score_mod.test_scores import (
    CHUNKS,
    FORMS,
    LIMIT,
    MASKS,
    Decoder,
    assert_equal,
    scored,
    tokens,
)

CARRIED = [name for name, (_, said) in FORMS.items() if "carried: score" in said]


class Separated(Decoder):
    """Each token sees only those behind the last separator before it, of its own: a mask that tokens decide."""

    def forward(self, input_ids: Tensor) -> Tensor:
        size = input_ids.shape[1]
        position = torch.arange(size)
        distance = position[:, None] - position
        part = (input_ids % 7 == 3).long().cumsum(1)
        hidden = (distance < 0) | (part[:, :, None] != part[:, None])
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, hidden[:, None], distance)
        return self.head(x)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def model_of(name: str) -> nn.Module:
    if name == "separated":
        return Separated(scored(lambda m, t, d: t)).eval()
    if name in MASKS:
        return Decoder(scored(lambda m, t, d: t), MASKS[name][0]).eval()
    return Decoder(FORMS[name][0]).eval()


def steps(module: Any) -> Tensor:
    return torch.cat([module(part) for part in tokens().split(CHUNKS, 1)], 1)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "name",
    ["separated", "alibi of tokens", "by head", *(name for name in CARRIED if name != "alibi of tokens")],
)
def test_models_are_what_they_were(name: str) -> None:
    model = model_of(name)
    recipe = Recipe.load({}, max_tokens=LIMIT, compile={"mode": "none", "kernels": "cpp"}, verify="off")
    fast = api.build(model, understand(model), recipe)
    assert {decision.kernels for decision in fast.plan.decisions} == {"cpp"}
    assert_equal(steps(fast), model)


@pytest.mark.parametrize("name", ["separated", pytest.param("buckets", marks=pytest.mark.slow)])
def test_compiled(name: str) -> None:
    model = model_of(name)
    fast = kvcompile.optimize(model, Recipe.load({}, max_tokens=LIMIT, verify="quick"))
    assert {decision.kernels for decision in fast.plan.decisions} == {"cpp"}
    assert_equal(steps(fast), model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["separated", "buckets"])
def test_packaged(name: str, tmp_path: Path) -> None:
    """What an expression reads goes to the kernels that are in the package."""
    model = model_of(name)
    recipe = Recipe.load({}, max_tokens=LIMIT, max_batch=2, compile={"kernels": "cpp"}, verify="quick")
    kvcompile.export(model, tmp_path / "artifact", "aoti", recipe=recipe)
    session = Package(tmp_path / "artifact")
    parts = tokens().split(CHUNKS, 1)
    assert_equal(torch.cat([session.prefill(part, keep=None) for part in parts], 1), model)
