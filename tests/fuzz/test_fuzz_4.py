"""Decoders of fixed seeds are exact or refused: part 4 of 4."""

from __future__ import annotations

import pytest

from tests.fuzz.holds import fast, seed_holds, slow


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", fast(3))
def test_decoder(seed: int) -> None:
    seed_holds(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow(3))
def test_more_decoders(seed: int) -> None:
    seed_holds(seed)
