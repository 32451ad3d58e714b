"""A retention by scores that is added as CONTRIBUTING.md says has everything: recipe, plan, reference, oracle, verify.

It does what the section "Add a retention" says, and nothing else. What it scores by is of its own: the weights that
single steps give, and of a prompt none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import sympy
import torch
from pydantic import Field
from torch import Tensor

import kvcompile
from kvcompile.errors import VerificationError
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.oracle import retention as oracle
from kvcompile.kernels.oracle.choice import Choice
from kvcompile.kernels.oracle.retention.hooks import Hooks as OracleHooks
from kvcompile.kernels.oracle.retention.hooks import Pass, View
from kvcompile.kernels.reference import residual
from kvcompile.kernels.reference import retention as reference
from kvcompile.kernels.reference.kv_sides import sides
from kvcompile.kernels.reference.retention.by_position import ByPosition
from kvcompile.kernels.reference.retention.hooks import Gained
from kvcompile.kernels.reference.slots import Stored
from kvcompile.kernels.shared.retention import LATEST, held_in
from kvcompile.kernels.triton.supports import unsupported
from kvcompile.layouts import BufferSpec, CacheLayout, Retention, Slots
from kvcompile.layouts.retention import RETENTIONS
from kvcompile.layouts.retention.hooks import Hooks
from kvcompile.recipe import retention as configs
from kvcompile.recipe import schema
from tests.support.models import NanoGPT, make


@dataclass(frozen=True)
class Recalled(Hooks):
    """`tokens` stay: the newest `recent`, and of the others those that single steps have looked at most."""

    tokens: int
    recent: int
    kind: Literal["recalled"] = "recalled"
    sinks: int = 0

    by_score = True
    placement = "slots"
    num_notes = 2
    followed = "slots.token"

    @property
    def window(self) -> None:
        return None

    @property
    def state_heads(self) -> sympy.Expr:
        return sympy.Integer(1)

    def notes(self, num_kv_heads: int) -> tuple[BufferSpec, ...]:
        return (
            BufferSpec("slots.token", (1, self.tokens), torch.int32),
            BufferSpec("slots.score", (1, self.tokens), torch.float32),
        )

    def bytes_per_slot(self) -> sympy.Expr:
        return sympy.Integer(8)

    def budget(self) -> sympy.Expr:
        return sympy.Integer(self.tokens)

    def small(self, sinks: int, window: int, heavy: int) -> Recalled:
        return Recalled(min(self.tokens, window + heavy), min(self.recent, window))

    def __str__(self) -> str:
        return f"{self.tokens} recalled, {self.recent} newest"


class RecalledConfig(configs.Strict):
    kind: Literal["recalled"] = "recalled"
    tokens: configs.Positive
    recent: configs.Positive

    def build(self, place: configs.LayerContext) -> Retention:
        return Recalled(self.tokens, self.recent)


class InSlots(ByPosition):
    """The reference's words: one set of slots for all heads, each of which notes its token and its score."""

    retention: Any

    def slot(self, x: AttendInputs) -> Tensor:
        (token, score), of, position = x.notes, self.retention, x.positions[:, None]
        held = token.long()
        value = score.masked_fill(held > position - of.recent, float("inf"))
        lowest = value.amin(-1, keepdim=True)
        oldest = held.masked_fill((value > lowest) | value.isinf(), LATEST).argmin(-1, keepdim=True)
        slot = torch.remainder(torch.where(position < of.tokens, position, oldest), of.tokens)
        token.scatter_(2, slot, position.to(token.dtype))
        score.scatter_(2, slot, torch.zeros_like(score[..., :1]))
        return slot

    def held(self, x: AttendInputs, length: Tensor) -> Tensor:
        return held_in(x.notes[0], length)[:, 0]

    def note(self, x: AttendInputs, p: Tensor) -> None:
        x.notes[1].add_(p.mean((1, 2))[:, None])

    def keep(self, x: AttendInputs, stored: Stored, gained: Gained | None) -> None:
        (token, score), of, positions = x.notes, self.retention, x.positions
        tokens = torch.cat([stored.tokens, torch.where(positions < 0, -1, positions)], dim=1)
        scores = torch.cat([score[:, 0], score.new_zeros(positions.shape)], dim=1)
        value = scores.masked_fill(tokens > positions[:, -1:] - of.recent, float("inf"))
        newest = tokens.argsort(descending=True)
        ranked = value.masked_fill(tokens < 0, float("-inf")).gather(1, newest)
        stay = newest.gather(1, ranked.argsort(descending=True, stable=True))[:, : of.tokens]
        both = zip(sides(x.spec.layout, x.k, x.v, x.parts), (stored.keys, stored.values), strict=False)
        for (storage, vectors, mine), old in both:
            _, encoded = residual.settled(storage, vectors, mine, positions)
            for buffer, before, part in zip(mine, old, encoded, strict=False):
                buffer.copy_(residual.take(torch.cat([before, part], dim=2), stay))
        token.copy_(tokens.gather(1, stay)[:, None])
        score.copy_(scores.gather(1, stay)[:, None])


@dataclass
class InDictionary(OracleHooks[Any]):
    """The oracle's words: the score of each token that is kept, pass by pass."""

    kept: dict[int, float] = field(default_factory=dict)

    def passes(self, came: Sequence[Pass]) -> Sequence[Pass]:
        return came

    def view(self, one: Pass, queries: Tensor, shown: Tensor, held: Tensor | None) -> View:
        if one.columns == 1 and len(self.kept) == self.retention.tokens:
            self._forget(one.start, self.retention.tokens - 1, held)
        self.kept |= dict.fromkeys(queries.tolist(), 0.0)
        tokens = torch.tensor(sorted(self.kept))
        return View(tokens, shown[:, tokens], queries, tokens)

    def note(self, one: Pass, p: Tensor, held: Tensor | None) -> None:
        if one.columns == 1:
            for token, share in zip(sorted(self.kept), p.mean(0)[0].tolist(), strict=True):
                self.kept[token] += share
        else:
            self._forget(max(self.kept), self.retention.tokens, held)

    def _forget(self, last: int, count: int, held: Tensor | None) -> None:
        """Keep `count` of the tokens, or those of `held`, when `last` is the newest."""
        may_go = sorted(t for t in self.kept if t <= last - self.retention.recent)
        gone = set(sorted(may_go, key=self.kept.__getitem__)[: max(0, len(self.kept) - count)])
        if held is not None and gone:
            told = self.kept.keys() - set(held.tolist())
            if len(told) != len(gone) or not told <= set(may_go):
                raise ValueError(f"gave up {sorted(told)}, of which only {may_go} may go")
            gone = told
        if gone:
            values = torch.tensor([self.kept[t] for t in may_go])
            self.choices.append(Choice(values, torch.tensor([t in gone for t in may_go])))
        self.kept = {t: score for t, score in self.kept.items() if t not in gone}


def _again() -> None:
    for model in (schema.CacheConfig, schema.Recipe):
        model.model_rebuild(force=True)


@pytest.fixture
def recalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its lines in the tables; the schema of recipes is made again, as at an import."""
    monkeypatch.setattr("kvcompile.layouts.retention.RETENTIONS", [*RETENTIONS, Recalled])
    monkeypatch.setitem(reference.RETAINED, "recalled", InSlots)
    monkeypatch.setitem(oracle.RETAINED, "recalled", InDictionary)
    field_of = schema.CacheConfig.model_fields["retention"]
    known, discriminator = field_of.annotation, field_of.discriminator
    either = Annotated[known | RecalledConfig, Field(discriminator="kind")]  # type: ignore[operator]
    field_of.annotation, field_of.discriminator = either, None  # type: ignore[assignment]
    _again()
    yield
    field_of = schema.CacheConfig.model_fields["retention"]
    field_of.annotation, field_of.discriminator = known, discriminator
    _again()


RECIPE = {
    "cache": {"retention": {"kind": "recalled", "tokens": 12, "recent": 4}},
    "compile": {"mode": "none"},
}


def test_a_new_retention_by_scores_needs_its_own_files_and_nothing_else(recalled: None) -> None:
    model = make(NanoGPT)
    fast = kvcompile.optimize(model, RECIPE)  # which verifies it
    layout = fast.plan.decisions[0].layout
    assert layout.retention == Recalled(12, 4) and layout.placement == Slots() and layout.slots(None) == 12
    assert fast.report["checks"] and not fast.plan.decisions[0].lossless
    assert CacheLayout.from_json(layout.to_json()) == layout
    ids = torch.randint(0, 61, (2, 30), generator=torch.Generator().manual_seed(0))
    parts = (ids[:, :9], *ids[:, 9:].split(1, 1))
    cached = torch.cat([fast(part) for part in parts], dim=1)
    assert fast.cache.nbytes == fast.plan.bytes(2)
    exact = model(ids)
    torch.testing.assert_close(cached[:, :12], exact[:, :12], rtol=1e-4, atol=1e-4)  # all are kept so far
    assert (cached[:, 12:] - exact[:, 12:]).abs().max() > 0.01 * exact.abs().max()


@pytest.mark.parametrize(
    "method, broken",
    [
        ("note", lambda self, x, p: None),
        ("visible", lambda self, x, tokens: tokens[:, None] != x.positions[:, :, None]),
        ("held", lambda self, x, length: held_in(x.notes[0], length)[:, 0].roll(1, -1)),
    ],
)
def test_verification_holds_the_reference_to_the_oracle(
    recalled: None, monkeypatch: pytest.MonkeyPatch, method: str, broken: Any
) -> None:
    monkeypatch.setattr(InSlots, method, broken)
    with pytest.raises(VerificationError):
        kvcompile.optimize(make(NanoGPT), RECIPE)


@pytest.mark.parametrize(
    "hidden",
    [
        lambda token, held: token[:, 0] == 0,
        lambda token, held: (held == held.amax(-1, keepdim=True)) & (held < 0).any(-1, keepdim=True),
    ],
    ids=["the first token", "the newest until all are full"],
)
def test_steps_of_an_almost_empty_cache_are_held_to_the_oracle(
    recalled: None, monkeypatch: pytest.MonkeyPatch, hidden: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Prompts fill the small budgets of the other checks before any token comes alone."""

    def held(self: InSlots, x: AttendInputs, length: Tensor) -> Tensor:
        found = held_in(x.notes[0], length)[:, 0]
        return found.masked_fill(hidden(x.notes[0], found), -1)

    monkeypatch.setattr(InSlots, "held", held)
    with pytest.raises(VerificationError, match="token by token"):
        kvcompile.optimize(make(NanoGPT), RECIPE | {"verify": "thorough"})


def test_kernels_say_that_they_do_not_know_it() -> None:
    layout = CacheLayout(placement=Slots(), retention=Recalled(12, 4))
    assert "no kernels are written for retention" in str(unsupported(layout, torch.float32))


def test_rooms_that_have_no_words_for_it_say_so() -> None:
    """None takes it for a retention by positions."""
    for room in (reference, oracle):
        with pytest.raises(KeyError, match="recalled"):
            room.retained(Recalled(12, 4))
