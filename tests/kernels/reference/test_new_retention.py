"""A retention that is added as CONTRIBUTING.md says has everything: recipe, plan, reference, oracle, verification.

It does what the section "Add a retention" says, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import sympy
import torch
from pydantic import Field
from torch import Tensor

import kvcompile
from kvcompile.errors import VerificationError
from kvcompile.kernels.oracle import kept
from kvcompile.kernels.triton.supports import unsupported
from kvcompile.layouts import CacheLayout, Retention, Ring
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.retention import RETENTIONS
from kvcompile.layouts.retention.hooks import Hooks
from kvcompile.recipe import retention as configs
from kvcompile.recipe import schema
from tests.support.models import NanoGPT, make


@dataclass(frozen=True)
class Blocks(Hooks):
    """A query sees its own block of `size` tokens and the one before, in a ring of both."""

    size: int
    kind: Literal["blocks"] = "blocks"
    sinks: int = 0

    @property
    def window(self) -> int:
        return 2 * self.size

    @property
    def shown(self) -> tuple[sympy.Basic, ...]:
        return (sympy.floor(sy.query / self.size) - 1 <= sympy.floor(sy.key / self.size),)

    def budget(self) -> sympy.Expr:
        return sympy.Integer(2 * self.size)

    def small(self, sinks: int, window: int, heavy: int) -> Blocks:
        return Blocks(min(self.size, window))

    def __str__(self) -> str:
        return f"blocks of {self.size}"


class BlocksConfig(configs.Strict):
    kind: Literal["blocks"] = "blocks"
    size: configs.Positive

    def build(self, place: configs.LayerContext) -> Retention:
        return Blocks(self.size)


def in_blocks(retention: Retention, query: Tensor, key: Tensor) -> Tensor:
    """The oracle's words: blocks have numbers, and no query's is more than one ahead."""
    assert isinstance(retention, Blocks)
    return query // retention.size - key // retention.size <= 1


def _again() -> None:
    for model in (schema.CacheConfig, schema.Recipe):
        model.model_rebuild(force=True)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its lines in the tables; the schema of recipes is made again, as at an import."""
    monkeypatch.setattr("kvcompile.layouts.retention.RETENTIONS", [*RETENTIONS, Blocks])
    monkeypatch.setitem(kept.KEPT, "blocks", in_blocks)
    field = schema.CacheConfig.model_fields["retention"]
    known, discriminator = field.annotation, field.discriminator
    either = Annotated[known | BlocksConfig, Field(discriminator="kind")]  # type: ignore[operator]
    field.annotation, field.discriminator = either, None  # type: ignore[assignment]
    _again()
    yield
    field = schema.CacheConfig.model_fields["retention"]
    field.annotation, field.discriminator = known, discriminator
    _again()


RECIPE = {
    "cache": {"retention": {"kind": "blocks", "size": 8}},
    "compile": {"mode": "none"},
}


def test_a_new_retention_needs_its_own_files_and_nothing_else(blocks: None) -> None:
    model = make(NanoGPT)
    fast = kvcompile.optimize(model, RECIPE)  # which verifies it
    layout = fast.plan.decisions[0].layout
    assert layout.retention == Blocks(8) and layout.placement == Ring() and layout.slots(None) == 16
    assert fast.report["checks"] and not fast.plan.decisions[0].lossless
    assert CacheLayout.from_json(layout.to_json()) == layout
    ids = torch.randint(0, 61, (2, 60), generator=torch.Generator().manual_seed(0))
    parts = (ids[:, :21], ids[:, 21:22], ids[:, 22:43], *ids[:, 43:].split(1, 1))
    cached = torch.cat([fast(part) for part in parts], dim=1)
    assert fast.cache.nbytes == fast.plan.bytes(2)
    exact = model(ids)
    torch.testing.assert_close(cached[:, :16], exact[:, :16], rtol=1e-4, atol=1e-4)  # all are seen so far
    assert (cached[:, 16:] - exact[:, 16:]).abs().max() > 0.01 * exact.abs().max()
    fast.reset()
    torch.testing.assert_close(fast(ids), cached, rtol=1e-4, atol=1e-4)


def test_verification_holds_the_reference_to_the_oracle(
    blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Blocks, "shown", ())  # all that stands in the ring is seen
    with pytest.raises(VerificationError):
        kvcompile.optimize(make(NanoGPT), RECIPE)


def test_kernels_say_that_they_do_not_know_it() -> None:
    assert "no kernels are written for retention" in str(
        unsupported(CacheLayout(placement=Ring(), retention=Blocks(8)), torch.float32)
    )
