"""A code that is added by its data alone has everything: recipe, plan, reference, oracle, verification, estimate.

It does what the section "Add a storage" of CONTRIBUTING.md says, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch

import kvcompile
from kvcompile.kernels.triton.supports import unsupported
from kvcompile.layouts import CODES, CacheLayout, Code, Scale, Storage
from kvcompile.recipe import schema, storage
from tests.support.models import NanoGPT, make

# Sixteen levels in even steps.
TOY = Code(
    "toy4", "codebook", 4, torch.uint8, 1.0, (("group", False),), levels=tuple(x / 7 for x in range(-8, 8))
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its line in the table; the schema of recipes is made again of the table, as at an import."""
    monkeypatch.setitem(CODES, "toy4", TOY)
    monkeypatch.setitem(storage._BY_TITLE, "toy4", (TOY,))
    models = (storage.StorageConfig, storage.KeysConfig)
    kept = [model.model_fields["dtype"].annotation for model in models]
    for model in models:
        model.model_fields["dtype"].annotation = Literal[tuple(storage._BY_TITLE)]  # type: ignore[assignment]
    _again()
    yield "toy4"
    for model, annotation in zip(models, kept, strict=True):
        model.model_fields["dtype"].annotation = annotation
    _again()


def _again() -> None:
    for model in (storage.StorageConfig, storage.KeysConfig, schema.CacheConfig, schema.Recipe):
        model.model_rebuild(force=True)


def test_a_new_code_needs_its_data_and_nothing_else(toy: str) -> None:
    side = {"dtype": toy, "sinks": 2}
    recipe = {"cache": {"keys": side, "values": {"dtype": toy}}, "compile": {"mode": "none"}}
    model = make(NanoGPT)
    fast = kvcompile.optimize(model, recipe, max_tokens=64)  # which verifies it
    layout = fast.plan.decisions[0].layout
    assert layout.keys == Storage(toy, Scale("group"), sinks=2)
    assert fast.report["checks"] and "toy4" in str(fast.plan.decisions[0].layout)
    ids = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    cached = torch.cat([fast(ids[:, :30]), *(fast(ids[:, i : i + 1]) for i in range(30, 40))], dim=1)
    exact = model(ids)
    assert not torch.equal(cached, exact)
    assert (cached - exact).abs().max() < 0.5 * exact.abs().max()
    assert layout.to_json() == CacheLayout.from_json(layout.to_json()).to_json()


def test_kernels_say_that_they_do_not_know_it(toy: str) -> None:
    layout = CacheLayout(Storage(toy, Scale("group", 32)))
    assert unsupported(layout, torch.float32) == "no kernels are written for keys in 'toy4/g32'"
