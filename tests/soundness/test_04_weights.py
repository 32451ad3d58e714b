"""Cause 4: weights after the softmax were compared at 29 tokens. Adaptive spans and gates are held."""

from __future__ import annotations

import pytest

from tests.soundness.checks import BY_PLACES, exact, held, refused, weighed

SPANS = (
    "((c.weight('span', c.heads_count, 1, 1).abs() * 100 + 32 - d) / 32).clamp(0, 1)",
    "((100 + 32 - d) / 32.0).clamp(0.0, 1.0)",
    "(1 - d / 400.0).clamp(min=0.0)",
    "(d < 100).to(c.model.dtype)",
    "torch.where(d > 150, 0.5, 1.0)",
    "0.99 ** d.clamp(min=0)",
    "torch.where(j < 200, 1.0, 0.7)",
    "torch.where(i < 200, 1.0, 1.5)",
    "c.heads(1.0, 0.5, 0.0, 2.0)",
    "c.weight('gate', c.heads_count, 1, 1)",
)


@pytest.mark.few(3)
@pytest.mark.parametrize("text", SPANS)
def test_weights(text: str) -> None:
    exact(weighed(text))


@pytest.mark.few(2)
@pytest.mark.parametrize("text", SPANS[:6])
def test_weights_made_one_again(text: str) -> None:
    exact(weighed(text, again=True))


@pytest.mark.few(2)
@pytest.mark.parametrize("text", SPANS[::3])
def test_weights_of_padded_rows(text: str) -> None:
    exact(weighed(text, **BY_PLACES))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "text",
    [
        "c.at_q(c.linear('gate', c.heads_count).sigmoid())",
        "c.at_k(c.linear('gate', c.heads_count).sigmoid())",
        "torch.where(c.at_k(c.hidden()), 0.0, 1.0)",
        "torch.where(c.at_q(c.hidden()), 0.3, 1.0)",
        "torch.where(c.at_k(c.image()) & (d > 100), 0.0, 1.0)",
    ],
)
def test_weights_from_tokens(text: str) -> None:
    held(weighed(text), "softmax|weigh|values")


@pytest.mark.parametrize("text", ["(1.0 - d / n)", "torch.full((), 1.0) * n / 100", "1.0 + (n > 300) * 1.0"])
def test_weights_by_the_length_of_the_text(text: str) -> None:
    refused(weighed(text), "length|size|position|sym|softmax|weigh")
