"""Cause 14: a buffer that forward changes was frozen; with it autocast and in-place writes."""

from __future__ import annotations

import pytest

from tests.fuzz.parts import Part
from tests.soundness.checks import ROPE, decoder, exact, held, refused

STATE = "state|buffer|chang|mutat|carried|written|in.place"


@pytest.mark.few(2)
@pytest.mark.parametrize("habit", ["a counter", "running statistics"])
@pytest.mark.parametrize("position", [ROPE, Part("learned, arange", ("arange",)), Part("none")], ids=str)
def test_buffers_that_calls_change(habit: str, position: Part) -> None:
    """How many calls a text takes would decide the result."""
    refused(decoder(habit=Part(habit), position=position), STATE)


@pytest.mark.few(2)
@pytest.mark.parametrize("habit", ["a counter of tokens", "an idle counter", "an attribute"])
@pytest.mark.parametrize("verify", ["off", "quick"])
def test_state_that_could_be_carried(habit: str, verify: str) -> None:
    held(decoder(habit=Part(habit)), STATE, verify)


@pytest.mark.parametrize("habit", ["in place", "in place by id", "a vocabulary"])
def test_habits_that_do_no_harm(habit: str) -> None:
    exact(decoder(habit=Part(habit)))


def test_a_write_to_the_first_token() -> None:
    held(decoder(habit=Part("in place, one token")), "position|token|sequence")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast(dtype: str) -> None:
    held(decoder(habit=Part("autocast"), dtype=dtype, position=ROPE), "autocast")
