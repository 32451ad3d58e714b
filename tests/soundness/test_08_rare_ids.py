"""Cause 8: mixing that only rare ids cause, and cumulative operators that were not known as such."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.spec import Special
from tests.soundness.checks import held, mixed, placed, refused

MIX = "mix|tokens|sequence|state|position|cum|ids"
RARE: tuple[tuple[Any, ...], ...] = (
    ("once seen",),
    ("since the separator",),
    ("shift of rare ids", 1),
    ("shift of rare ids", 20),
    ("same as before",),
    ("running maximum",),
    ("capacity of a row", 100),
)


@pytest.mark.few(3)
@pytest.mark.parametrize("case", RARE, ids=str)
@pytest.mark.parametrize("special", [Special(), Special(58, 59, 60, 57)], ids=["low ids", "high ids"])
def test_rare_ids(case: tuple[Any, ...], special: Special) -> None:
    held(mixed(*case, special=special), MIX)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["learned", "sinusoid", "rope half", "rope interleaved", "rope complex"])
@pytest.mark.parametrize("source", ["restart at SEP", "counted documents", "counted ids"])
def test_positions_that_ids_decide(kind: str, source: str) -> None:
    more = () if kind in ("learned", "sinusoid") else (10000.0,)
    held(placed(f"{kind}, {source}", source, *more), MIX)


def test_angles_counted_by_a_gate() -> None:
    held(placed("rope, by content"), MIX)


def test_an_id_anywhere_in_the_text() -> None:
    refused(mixed("anywhere"), MIX)
