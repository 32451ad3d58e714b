"""Cause 11: positions were offset after they had been rounded."""

from __future__ import annotations

import pytest

from tests.soundness.checks import held, placed

KINDS = ("learned", "sinusoid", "rope half", "rope half of the channels", "rope interleaved", "rope complex")


def args_of(kind: str, source: str) -> tuple[object, ...]:
    return (source,) if kind in ("learned", "sinusoid") else (source, 10000.0)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_positions_in_half_precision(kind: str, source: str) -> None:
    held(placed(f"{kind}, {source}", *args_of(kind, source)), "position|round|precision|dtype")


@pytest.mark.few(3)
@pytest.mark.parametrize("source", ["late", "clamped", "wrapped", "halved", "steps of 2"])
@pytest.mark.parametrize("kind", ["learned", "rope half"])
def test_positions_that_change_far_away(kind: str, source: str) -> None:
    held(placed(f"{kind}, {source}", *args_of(kind, source)), "position")
