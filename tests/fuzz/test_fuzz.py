"""The fuzzer itself: its oracle catches what is wrong and passes what is right, and hypothesis draws from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.fuzz import check as checking
from tests.fuzz.check import Outcome, check, original, text
from tests.fuzz.decoder import build
from tests.fuzz.draw import decoders, spec_from_seed
from tests.fuzz.failures import FAILURES, UNTRUE
from tests.fuzz.holds import holds
from tests.fuzz.parts import Part
from tests.fuzz.spec import DecoderSpec, Layer

PLAIN = DecoderSpec()
ROPE = DecoderSpec(position=Part("rope half, arange", ("arange", 10000.0)))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FAILURES)
def test_failures_stay_away(name: str) -> None:
    holds(FAILURES[name])


@pytest.mark.parametrize("name", UNTRUE)
def test_what_a_cache_can_hold_is_exact(name: str) -> None:
    outcome = check(UNTRUE[name])
    assert outcome.kind == "exact", f"{outcome.kind}: {outcome.told}"


@pytest.mark.parametrize("spec", [PLAIN, ROPE], ids=["plain", "rope"])
@pytest.mark.parametrize("verify", ["off", "quick"])
def test_plain_decoders_are_exact(spec: DecoderSpec, verify: str) -> None:
    assert check(spec, verify).kind == "exact"


def test_what_shows_the_future_is_refused() -> None:
    outcome = check(DecoderSpec(layers=(Layer(mask=Part("bidirectional", ("d == d",))),)))
    assert outcome.kind == "refused" and "bidirectional" in outcome.told


class Other:
    """An optimized decoder with a mistake: from token `start` on, or under padding, it computes another text's."""

    def __init__(self, spec: DecoderSpec, start: int, in_padding: bool = False):
        self.model, self.start, self.in_padding = build(spec), start, in_padding
        self.reset()

    def reset(self) -> None:
        self.ids = torch.zeros(2, 0, dtype=torch.long)

    def __call__(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.ids = torch.cat([self.ids, ids], 1)
        seen = self.ids.clone()
        if not self.in_padding and seen.shape[1] > self.start:
            seen[:, self.start] = (seen[:, self.start] + 1) % 61
        outs = []
        for number, row in enumerate(seen):
            pads = 0
            if attention_mask is not None and not self.in_padding:
                pads = int((attention_mask[number] == 0).sum())
            out = self.model(row[None, pads:])
            outs.append(torch.cat([out.new_zeros(1, pads, out.shape[-1]), out], 1))
        return torch.cat(outs)[:, -ids.shape[1] :]


@pytest.mark.parametrize(
    ("start", "in_padding", "kind"),
    [(9999, False, "exact"), (0, False, "WRONG"), (300, False, "WRONG"), (9999, True, "WRONG")],
)
def test_the_oracle(monkeypatch: pytest.MonkeyPatch, start: int, in_padding: bool, kind: str) -> None:
    """A stand-in that is right passes; one wrong token in 355, or padding that is seen, is caught."""
    monkeypatch.setattr(checking, "optimized", lambda model, spec, verify: Other(spec, start, in_padding))
    outcome = check(ROPE if not in_padding else PLAIN)
    assert outcome.kind == kind, outcome
    assert ("padding" in outcome.told) == in_padding


@pytest.mark.parametrize(
    ("error", "kind"), [(RuntimeError("no"), "CRASH"), (checking.KVCompileError(""), "CRASH")]
)
def test_other_errors_are_failures(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str) -> None:
    def fails(*args: Any) -> None:
        raise error

    monkeypatch.setattr(checking, "optimized", fails)
    assert check(PLAIN).kind == kind


def test_original_without_numbers_is_discarded() -> None:
    nothing = Layer(
        mask=Part("window", ("d > 5",)),
        spelling=Part("eager", ("masked_fill", float("-inf"), "matmul", "mask last")),
    )
    assert check(DecoderSpec(layers=(nothing,))).kind == "discarded"


def test_the_same_seed_is_the_same_decoder() -> None:
    for seed in (3, 17):
        spec = spec_from_seed(seed)
        assert spec == spec_from_seed(seed) and hash(spec) == hash(spec_from_seed(seed))
        ids = text(spec)
        assert torch.equal(original(spec, ids), original(spec, ids))
        from tests.fuzz.parts import Part
        from tests.fuzz.spec import DecoderSpec, Layer, Special

        names = {
            "Part": Part,
            "DecoderSpec": DecoderSpec,
            "Layer": Layer,
            "Special": Special,
            "inf": float("inf"),
        }
        assert eval(repr(spec), names) == spec


def test_texts_have_what_masks_ask_for() -> None:
    """Special ids, and most of the vocabulary."""
    spec = DecoderSpec()
    ids = text(spec)
    assert ids.shape == (2, 355) and len(ids.unique()) > 50
    for row in ids:
        assert (row == spec.special.sep).sum() > 1 and (row == spec.special.image).sum() > 10


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=decoders())
def test_drawn_by_hypothesis(spec: DecoderSpec) -> None:
    holds(spec)


def test_outcomes_tell() -> None:
    assert Outcome("refused", "x").good and not Outcome("WRONG", "x").good
