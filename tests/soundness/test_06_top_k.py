"""Cause 6: a top-k wider than the probe looked like a mask. Indexers, with k on both sides of the text's length."""

from __future__ import annotations

import pytest

from tests.fuzz.parts import Part
from tests.fuzz.spec import Layer
from tests.soundness.checks import EAGER, decoder, exact, held, refused

# Positions are learned, so that no two tokens are a tie, among which a top-k may choose.
SPELLINGS = ("scatter", "zeros", "full")


def indexer(k: int, how: str) -> Layer:
    return Layer(select=Part("indexer", (k, how)))


@pytest.mark.few(3)
@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("k", [8, 64, 200, 2048])
def test_the_best_keys(k: int, how: str) -> None:
    exact(decoder(indexer(k, how)))


@pytest.mark.few(2)
@pytest.mark.parametrize("k", [16, 100, 354, 355, 356])
def test_where_the_text_is_as_long_as_k(k: int) -> None:
    exact(decoder(indexer(k, "scatter"), fused=True))


@pytest.mark.parametrize("k", [64, 2048])
def test_by_threshold(k: int) -> None:
    held(decoder(Layer(select=Part("indexer, all as good", (k, "threshold")))), "mask|token|score|activation")


@pytest.mark.parametrize("k", [30, 64, 400])
def test_of_padded_rows(k: int) -> None:
    held(decoder(indexer(k, "scatter"), forward="position_ids"))


@pytest.mark.parametrize("k", [8, 64, 200])
def test_the_best_scores(k: int) -> None:
    held(decoder(Layer(softmax=Part("best scores", (k,)), spelling=EAGER)), "softmax|score|attention")


@pytest.mark.parametrize("name", ["indexer, threshold", "gated keys"])
def test_keys_chosen_by_a_threshold(name: str) -> None:
    held(decoder(Layer(select=Part(name))))


@pytest.mark.parametrize("k", [64, 100, 200])
def test_the_best_of_the_whole_text(k: int) -> None:
    refused(decoder(Layer(select=Part("best of the whole text", (k,)))), ".")
