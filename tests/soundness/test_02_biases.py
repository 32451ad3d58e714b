"""Cause 2: biases that were seen at short distances only. A cache holds all but those by the text's length."""

from __future__ import annotations

import pytest

from tests.soundness.checks import BY_PLACES, biased, exact, held, refused

BIASES = (
    "c.table(32, d.clamp(min=0) >> 7)",
    "c.table(32, (d.clamp(min=0) // 128).clamp(max=31))",
    "c.table(16, (d.clamp(min=1).float().log2() * 1.5).long().clamp(0, 15))",
    "c.table(1024, d.clamp(0, 1023))",
    "c.table(257, d.clamp(-128, 128) + 128)",
    "-F.relu(d - 100.0) * 0.05",
    "-F.relu(d - 3000.0)",
    "F.relu(d - 3000)",
    "-(d - 200).clamp(min=0) * 0.1",
    "torch.where(d > 150, -3.0, 0.0)",
    "(d > 150) * -3.0",
    "(d == 200) * 5.0",
    "-c.heads(0.0, 0.0, 0.5, 0.0) * (d - 90).clamp(min=0)",
    "((i > 200) & (j < 10)) * 3.0",
    "(i // 128 == j // 128) * 1.0",
    "(j % 100 == 99) * 2.0",
    "torch.sin(j * 0.05) * 2",
    "c.weight('key', c.model.longest)[:n]",
    "c.weight('pairs', c.heads_count, c.model.longest, c.model.longest)[:, :n, :n]",
    "-c.slopes() * d.clamp(max=100)",
    "-c.slopes() * d.clamp(min=0).float().sqrt()",
    "-d * d * 1e-4",
    "d / (i + 1.0) * -4.0",
    "c.slopes() * (j - n + 1)",
)


@pytest.mark.few(4)
@pytest.mark.parametrize("text", BIASES)
def test_biases(text: str) -> None:
    exact(biased(text))


@pytest.mark.few(2)
@pytest.mark.parametrize("text", BIASES[::5])
def test_biases_in_a_mask_that_adds(text: str) -> None:
    exact(biased(text, eager=False))


@pytest.mark.few(2)
@pytest.mark.parametrize("text", BIASES[2::6])
def test_biases_of_padded_rows(text: str) -> None:
    exact(biased(text, **BY_PLACES))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "text",
    [
        "c.at_k(c.linear('bias', c.heads_count))",
        "c.at_k(c.weight('ids', c.model.spec.vocab)[ids])",
        "c.at_k(c.hidden()) * -2.0",
        "-c.at_q(c.linear('slope', c.heads_count).sigmoid()) * d * 0.1",
        "c.at_q(c.hidden()) * (d > 100) * -4.0",
        "c.at_q(c.linear('a', c.heads_count)) * c.at_k(c.linear('b', c.heads_count))",
        "(lambda t: c.at_q(t) - c.at_k(t))(F.logsigmoid(c.linear('g', c.heads_count)).cumsum(1))",
    ],
)
def test_biases_from_tokens(text: str) -> None:
    held(biased(text), "bias|score|token|mix|activation|state")


@pytest.mark.parametrize("text", ["d / n * -3.0", "(d > n // 2) * -2.0", "d.clamp(min=0) * (n > 300) * -0.1"])
def test_biases_by_the_length_of_the_text(text: str) -> None:
    refused(biased(text), "length|size|position|sym|bias|score")
