"""Decoders of fixed seeds are exact or refused: part 2 of 4."""

from __future__ import annotations

import pytest

from tests.fuzz.holds import fast, seed_holds, slow


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", fast(1))
def test_decoder(seed: int) -> None:
    seed_holds(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow(1))
def test_more_decoders(seed: int) -> None:
    seed_holds(seed)
