"""Masks that show the future, most of them late, rarely or to some heads only: no cache holds them."""

from __future__ import annotations

import pytest

from tests.fuzz.parts import Part
from tests.fuzz.spec import Layer
from tests.soundness.checks import EAGER, decoder, refused, shown

TEXTS = (
    "d == d",
    "d >= -1",
    "(i >= j) | (j < 40)",
    "(i >= j) | ((i >= 200) & (j == i + 3))",
    "i // 32 >= j // 32",
    "i // 200 == j // 200",
    "(i | 7) >= j",
    "(i >= j) | (h == 3)",
    "(i >= j) | (i == 300)",
    "d > -0.5 - (i > 400) * 1.0",
    "c.tril(1)",
    "(i < 100) & (i >= j) | (i >= 100) & (i >= j - 1)",
    "j <= i.clamp(min=64)",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("text", TEXTS)
def test_the_future_is_refused(text: str) -> None:
    refused(shown(text), "future|bidirectional|sees key|later")


@pytest.mark.parametrize("response", [Part("softcap", (5.0,)), Part("clamped", (3.0,))])
def test_a_mask_that_a_softcap_undoes(response: Part) -> None:
    """Hidden scores become -5 and are seen again."""
    spelling = Part("eager", ("masked_fill", float("-inf"), "matmul", "mask first"))
    refused(
        decoder(Layer(response=response, spelling=spelling)), "future|bidirectional|sees key|softmax|score"
    )


def test_a_mask_by_product() -> None:
    spelling = Part("eager", ("times", 0.0, "matmul", "mask last"))
    refused(decoder(Layer(spelling=spelling)), "future|bidirectional|sees key|mask|score")


@pytest.mark.parametrize("name", ["standardised", "less the most of all"])
def test_scores_that_look_at_all_scores(name: str) -> None:
    refused(decoder(Layer(response=Part(name), spelling=EAGER)), ".")


@pytest.mark.few(2)
@pytest.mark.parametrize("text", ["d < n // 2", "j < n - 5", "(n < 300) | (d < 50)", "i + n > j * 2 + 400"])
def test_masks_by_the_length_of_the_text(text: str) -> None:
    """A token's window changes as the text grows; what was computed for it cannot."""
    refused(shown(f"(i >= j) & (({text}) | (d == 0))"), "length|size|future|sym|position|mask")
