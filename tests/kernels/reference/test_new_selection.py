"""A selection that is added as CONTRIBUTING.md says has everything: recipe, plan, reference, oracle, verification.

It does what the section "Add a selection" says, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor

import kvcompile
from kvcompile.errors import VerificationError
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.oracle import selection as oracle
from kvcompile.kernels.reference import selections
from kvcompile.kernels.triton.supports import unsupported
from kvcompile.layouts import CacheLayout, Selection
from kvcompile.layouts.selection import SELECTIONS
from kvcompile.layouts.selection.hooks import Hooks
from kvcompile.recipe import schema
from kvcompile.recipe.retention import LayerContext, Positive, Strict
from tests.support.models import NanoGPT, make


@dataclass(frozen=True)
class Strided(Hooks):
    """A step reads the newest `recent` tokens, and every `stride`-th of those before."""

    stride: int
    recent: int
    kind: Literal["strided"] = "strided"

    def small(self, size: int, count: int) -> Strided:
        return Strided(min(self.stride, size), min(self.recent, count))

    def __str__(self) -> str:
        return f"{self.recent} newest and every {self.stride}th"


class StridedConfig(Strict):
    kind: Literal["strided"] = "strided"
    stride: Positive
    recent: Positive

    def build(self, place: LayerContext) -> Selection:
        return Strided(self.stride, self.recent)


def slots(x: AttendInputs) -> Tensor | None:
    """The reference's words: slots [B, Hkv, N], -1 where the newest take one already, or there is none."""
    of = x.spec.layout.selection
    assert isinstance(of, Strided)
    if x.q.shape[2] > 1:
        return None
    newest = x.positions - torch.arange(of.recent)
    every = torch.arange(0, x.span, of.stride).expand(len(newest), -1)
    every = torch.where(every < newest[:, -1:], every, -1)
    chosen = torch.cat([newest.clamp(min=-1), every], dim=1)
    return chosen[:, None].expand(-1, x.k.shape[1], -1)


def read(
    of: Selection,
    q: Tensor,
    k: Tensor,
    sm_scale: float,
    chunks: Sequence[int],
    padding: Tensor | None = None,
    held: object = None,
) -> tuple[Tensor, list[Any]]:
    """The oracle's words: which keys each query reads, bool [B, Hq, T, T]."""
    assert isinstance(of, Strided)
    total = k.shape[2]
    seen = torch.ones(k.shape[0], q.shape[1], total, total, dtype=torch.bool)
    end = 0
    for columns in chunks:
        end += columns
        for row in range(len(seen)):
            first = 0 if padding is None else int(padding[row])
            if columns == 1 and end > first:
                token = torch.arange(total) - first
                mine = (token > end - 1 - first - of.recent) | (token % of.stride == 0)
                seen[row, :, end - 1] = mine
    return seen, []


def _again() -> None:
    for model in (schema.CacheConfig, schema.Recipe):
        model.model_rebuild(force=True)


@pytest.fixture
def strided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its lines in the tables; the schema of recipes is made again, as at an import."""
    monkeypatch.setattr("kvcompile.layouts.selection.SELECTIONS", [*SELECTIONS, Strided])
    monkeypatch.setitem(selections.SELECT, "strided", slots)
    monkeypatch.setitem(oracle.READ, "strided", read)
    field = schema.CacheConfig.model_fields["selection"]
    known, discriminator = field.annotation, field.discriminator
    either = Annotated[known | StridedConfig, Field(discriminator="kind")]  # type: ignore[operator]
    field.annotation, field.discriminator = either, None  # type: ignore[assignment]
    _again()
    yield
    field = schema.CacheConfig.model_fields["selection"]
    field.annotation, field.discriminator = known, discriminator
    _again()


RECIPE = {
    "cache": {"keys": {"dtype": "int8"}, "selection": {"kind": "strided", "stride": 3, "recent": 4}},
    "compile": {"mode": "none"},
}


def test_a_new_selection_needs_its_own_files_and_nothing_else(strided: None) -> None:
    model = make(NanoGPT)
    fast: Any = kvcompile.optimize(model, RECIPE, max_tokens=64)  # which verifies it
    full: Any = kvcompile.optimize(model, {**RECIPE, "cache": {"keys": {"dtype": "int8"}}}, max_tokens=64)
    layout = fast.plan.decisions[0].layout
    assert layout.selection == Strided(3, 4) and fast.report["checks"]
    assert not fast.plan.decisions[0].lossless and "every 3th" in str(fast.plan.decisions[0].because)
    assert CacheLayout.from_json(layout.to_json()) == layout and layout.num_notes == 0
    ids = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    whole, steps = (
        torch.cat([module(part) for part in (ids[:, :20], *ids[:, 20:].split(1, 1))], dim=1)
        for module in (full, fast)
    )
    assert fast.cache.nbytes == fast.plan.bytes(2)
    assert (steps - whole)[:, :20].abs().max() < 0.1 * whole.abs().max()  # a prompt reads everything
    assert (steps - whole)[:, 20:].abs().max() > 0.01 * whole.abs().max()


def test_verification_holds_the_reference_to_the_oracle(
    strided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(selections.SELECT, "strided", lambda x: None)  # it reads all
    with pytest.raises(VerificationError):
        kvcompile.optimize(make(NanoGPT), RECIPE, max_tokens=64)


def test_kernels_say_that_they_do_not_know_it() -> None:
    told = unsupported(CacheLayout(selection=Strided(3, 4)), torch.float32)
    assert "no kernels are written for selection" in str(told)
