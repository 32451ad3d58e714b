"""Cause 12: values that depend on the length were compared in 16 rows."""

from __future__ import annotations

import pytest

from tests.fuzz.parts import Part
from tests.soundness.checks import decoder, exact, held, placed, refused

LENGTH = "length|size|position|sym|number|tokens mix"


@pytest.mark.few(2)
@pytest.mark.parametrize("limit", [16, 64, 128, 256, 300])
def test_rope_whose_base_grows_with_the_text(limit: int) -> None:
    refused(placed("rope, by the length", limit), LENGTH)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["learned", "sinusoid", "rope half"])
@pytest.mark.parametrize("source", ["of the length", "reversed", "flipped"])
def test_positions_counted_from_the_end(kind: str, source: str) -> None:
    more = () if kind in ("learned", "sinusoid") else (10000.0,)
    held(placed(f"{kind}, {source}", source, *more), LENGTH)


def test_logits_by_the_length() -> None:
    refused(decoder(output=Part("by length")), LENGTH)


@pytest.mark.few(3)
@pytest.mark.parametrize("source", ["len", "arange [B, S]", "arange [1, S]", "from 2"])
@pytest.mark.parametrize("kind", ["learned", "rope half", "rope interleaved"])
def test_lengths_that_only_count(kind: str, source: str) -> None:
    """`len(tensor)` is a number of Python's; one of the ways to capture must see through it."""
    more = () if kind == "learned" else (10000.0,)
    exact(placed(f"{kind}, {source}", source, *more))
