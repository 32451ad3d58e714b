"""Cause 13: counts that go over tokens counted padding, too."""

from __future__ import annotations

import pytest

from tests.fuzz.spec import Special
from tests.soundness.checks import exact, held, placed

KINDS = ("learned", "sinusoid", "rope half", "rope interleaved")


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["ones", "ones, cumsum(-1)", "no padding"])
@pytest.mark.parametrize("forward", ["input_ids", "position_ids"])
def test_counted_positions(kind: str, source: str, forward: str) -> None:
    """Exact in chunks; a padded row equals the row alone, or padding is refused at the call."""
    more = () if kind in ("learned", "sinusoid") else (10000.0,)
    exact(placed(f"{kind}, {source}", source, *more, forward=forward))


@pytest.mark.few(3)
@pytest.mark.parametrize("pad_id", [0, 3, 60])
@pytest.mark.parametrize("pads", [1, 23, 130])
def test_any_token_as_padding(pad_id: int, pads: int) -> None:
    exact(placed("learned, no padding", "no padding", pad_id=pad_id, pads=pads, special=Special(pad=3)))
    exact(placed("learned, ones", "ones", pad_id=pad_id, pads=pads))


@pytest.mark.few(2)
@pytest.mark.parametrize("source", ["counted documents", "counted ids", "restart at SEP"])
@pytest.mark.parametrize("pad_id", [5, 60])
def test_other_counts(source: str, pad_id: int) -> None:
    held(placed(f"learned, {source}", source, pad_id=pad_id, forward="position_ids"))
