"""Cause 1: masks that were seen at two short lengths and at integer literals only. All of these are causal: held."""

from __future__ import annotations

import pytest

from tests.fuzz.parts import Part
from tests.fuzz.spec import Layer
from tests.soundness.checks import BY_PLACES, decoder, exact, masked

CONDITIONS = (
    # windows, in every spelling of the number
    "d < 99.5",
    "d < 100.0",
    "d.float() < 99.5",
    "d < c.buf(100)",
    "d < c.one(100)",
    "d < c.heads(40, 80, 120, 160)",
    "d < torch.tensor(100)",
    "d < torch.full((), 100)",
    "d * d < 10000",
    "d ** 2 <= 9999",
    "d * 2 < 201",
    "j > i - c.buf(100)",
    "(d >> 2) < 25",
    "d / 4 < 25",
    "d < 64 + 36",
    # chunks
    "i // 64 - j // 64 < 2",
    "i // c.buf(64) == j // c.buf(64)",
    "(i >> 6) == (j >> 6)",
    "(i / 64).floor() == (j / 64).floor()",
    "i - i % 96 <= j",
    "(i ^ j) < 128",
    "torch.div(i, 100, rounding_mode='floor') == torch.div(j, 100, rounding_mode='floor')",
    # what begins beyond a short probe
    "(d < 40) | (i < 200)",
    "(i < 100) | (j >= 20)",
    "(j < 70) | (d < 90)",
    "(d < 128) | (d % 64 == 0)",
    "i * i - j * j < 90000",
    "(i - 100) * (j - 100) >= 0",
    "(i // 128 < 1) | (j % 2 == 0) | (d == 0)",
    # per head, tables
    "(h % 2 == 0) | (d < 90)",
    "d < 2 ** (h + 4)",
    "d < (h + 1) * 75",
    "c.bits(512, d.clamp(0, 511)) | (d == 0)",
    "c.bits(1024, j) | (d == 0)",
    "(d % 4 == 0) | (d < 70)",
    "((d & (d - 1)) == 0)",
)


@pytest.mark.few(4)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_masks(condition: str) -> None:
    exact(masked(condition))


@pytest.mark.few(2)
@pytest.mark.parametrize("condition", CONDITIONS[::6])
def test_masks_filled_by_hand(condition: str) -> None:
    exact(masked(condition, eager=True))


@pytest.mark.few(2)
@pytest.mark.parametrize("condition", CONDITIONS[1::7])
def test_masks_of_padded_rows(condition: str) -> None:
    exact(masked(condition, **BY_PLACES))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "how", ["where", "add", "one minus", "times and less", "masked_fill_", "masked_fill, 0"]
)
def test_a_late_mask_in_every_spelling(how: str) -> None:
    text = Part("written", ("(i >= j) & ((i < 150) | (d < 60))",))
    exact(decoder(Layer(mask=text, spelling=Part("eager", (how, -1e9, "matmul", "mask last")))))


def test_layers_with_masks_of_their_own() -> None:
    masks = ("(i >= j) & (d < 99.5)", "(i >= j) & (i // 64 - j // 64 < 2)")
    exact(decoder(*(Layer(mask=Part("written", (text,))) for text in masks)))
