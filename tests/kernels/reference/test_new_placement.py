"""A placement that is added as CONTRIBUTING.md says has everything: recipe, plan, reference, verification.

It does what the section "Add a placement" says, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest
import sympy
import torch

import kvcompile
from kvcompile.errors import RecipeError
from kvcompile.kernels.triton.supports import unsupported
from kvcompile.layouts import CacheLayout, Retention, Window
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.placement import PLACEMENTS
from kvcompile.recipe import schema
from tests.support.models import NanoGPT, make


@dataclass(frozen=True)
class Backwards:
    """A ring that is filled from its end."""

    kind: Literal["backwards"] = "backwards"

    def num_slots(self, retention: Retention) -> sympy.Expr:
        return retention.budget()

    def address(self, retention: Retention) -> sympy.Expr:
        return retention.window - 1 - sympy.Mod(sy.pos, retention.window)

    def token_at(self, retention: Retention) -> sympy.Expr:
        last = sy.length - 1
        assert retention.window is not None
        return last - sympy.Mod(last - (retention.window - 1 - sy.slot), retention.window)

    def check(self, retention: Retention) -> str | None:
        plain = retention.window is not None and not retention.sinks
        return None if plain else "a ring that is filled backwards has a window and no sinks"

    def __str__(self) -> str:
        return "backwards"


def _again() -> None:
    for model in (schema.PlacementConfig, schema.CacheConfig, schema.Recipe):
        model.model_rebuild(force=True)


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its lines in the tables; the schema of recipes is made again, as at an import."""
    monkeypatch.setattr("kvcompile.layouts.placement.PLACEMENTS", (*PLACEMENTS, Backwards))
    field = schema.PlacementConfig.model_fields["kind"]
    known = field.annotation
    field.annotation = Literal["contiguous", "ring", "slots", "paged", "backwards"]  # type: ignore[assignment]
    _again()
    yield
    schema.PlacementConfig.model_fields["kind"].annotation = known
    _again()


def recipe(placement: str, retention: dict[str, object]) -> dict[str, object]:
    cache = {"keys": {"dtype": "int8"}, "retention": retention, "placement": {"kind": placement}}
    return {"cache": cache, "compile": {"mode": "none"}}


WINDOW: dict[str, object] = {"kind": "window", "size": 12}


def test_a_new_placement_needs_its_own_lines_and_nothing_else(backwards: None) -> None:
    model = make(NanoGPT)
    fast, ring = (kvcompile.optimize(model, recipe(kind, WINDOW)) for kind in ("backwards", "ring"))
    layout = fast.plan.decisions[0].layout
    assert layout.placement == Backwards() and layout.slots(None) == 12 and fast.report["checks"]
    assert CacheLayout.from_json(layout.to_json()) == layout
    ids = torch.randint(0, 61, (2, 50), generator=torch.Generator().manual_seed(0))
    parts = (ids[:, :17], ids[:, 17:18], ids[:, 18:25], *ids[:, 25:].split(1, 1))
    got, wanted = (torch.cat([module(part) for part in parts], dim=1) for module in (fast, ring))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)  # keys are summed in another order
    for name, buffer in fast.cache.buffers.items():  # and the slots are those of the ring, from the end
        torch.testing.assert_close(
            buffer.flip(2).float(), ring.cache.buffers[name].float(), rtol=1e-5, atol=1.0
        )


def test_what_it_does_not_go_with_is_refused(backwards: None) -> None:
    with pytest.raises(RecipeError, match="has a window and no sinks"):
        kvcompile.Recipe.load(recipe("backwards", {"kind": "sink_window", "sinks": 2, "window": 9}))


def test_kernels_say_that_they_do_not_know_it() -> None:
    layout = CacheLayout(placement=Backwards(), retention=Window(8))  # type: ignore[arg-type]
    assert unsupported(layout, torch.float32) == "no kernels are written for placement 'backwards'"
