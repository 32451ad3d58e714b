"""Cause 7: tokens were compared at 13 to 18 tokens. What mixes them outside attention is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.parts import Part
from tests.fuzz.spec import Layer
from tests.soundness.checks import decoder, exact, held, mixed, refused

MIX = "mix|softmax runs|later tokens|tokens|sequence|batch|convol|state|length|position"

EARLIER: tuple[tuple[Any, ...], ...] = (
    *(("convolution", dilation, 3) for dilation in (1, 8, 16, 32, 64)),
    ("convolution, padded", 32, 2),
    ("convolution, padded", 1, 3),
    *(("pad and slice", steps) for steps in (1, 8, 20, 64, 100)),
    *(("shift", steps) for steps in (1, 20, 64)),
    ("shift of some channels", 1),
    ("shift of some channels", 33),
    ("doubled shifts",),
    ("lower triangle",),
    ("exponential mean",),
    ("running mean",),
    ("running maximum",),
    ("first token",),
    ("first token, late", 100),
    ("bigrams",),
    ("same as before",),
    ("flipped twice",),
)
LATER = (
    ("convolution, open",),
    ("squeeze and excite",),
    ("the most of all",),
    ("normed over tokens",),
    ("last token",),
    ("expert choice", 32),
    ("expert choice", 200),
    ("groups of four",),
    ("fourier",),
    ("anywhere",),
)


@pytest.mark.few(4)
@pytest.mark.parametrize("case", EARLIER, ids=str)
@pytest.mark.parametrize("in_block", [False, True], ids=["before", "in the block"])
def test_earlier_tokens(case: tuple[Any, ...], in_block: bool) -> None:
    """A cache that kept more could hold these: exact or refused."""
    held(mixed(*case, in_block=in_block), MIX)


@pytest.mark.few(4)
@pytest.mark.parametrize("case", LATER, ids=str)
@pytest.mark.parametrize("in_block", [False, True], ids=["before", "in the block"])
def test_later_tokens(case: tuple[Any, ...], in_block: bool) -> None:
    refused(mixed(*case, in_block=in_block), MIX)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case", [("experts", 1), ("experts", 2), ("channels",), ("sequence first",)], ids=str
)
@pytest.mark.parametrize("in_block", [False, True], ids=["before", "in the block"])
def test_what_only_looks_like_it(case: tuple[Any, ...], in_block: bool) -> None:
    exact(mixed(*case, in_block=in_block))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("keys mixed with the last", ()),
        ("values of an earlier token", (1,)),
        ("values of an earlier token", (64,)),
        ("running mean of values", ()),
        ("keys less their mean", ()),
        ("keys in reverse", ()),
    ],
)
def test_keys_of_other_tokens(name: str, args: tuple[Any, ...]) -> None:
    held(decoder(Layer(keys=Part(name, args))), MIX)


@pytest.mark.parametrize("name", ["less what is seen", "softmax over tokens"])
def test_logits_of_other_tokens(name: str) -> None:
    refused(decoder(output=Part(name)), MIX)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["first row", "rolled rows", "mean of rows", "batch norm"])
def test_rows_of_the_batch(name: str) -> None:
    refused(mixed(name), "row|batch|mix")
    refused(mixed(name, in_block=True), "row|batch|mix")
