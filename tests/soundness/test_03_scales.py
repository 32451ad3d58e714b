"""Cause 3: the scale was measured at 29 tokens. Log-n, temperatures, per-head scales are held."""

from __future__ import annotations

import pytest

from tests.fuzz.parts import Part
from tests.fuzz.spec import Layer
from tests.soundness.checks import BY_PLACES, EAGER, decoder, exact, held, refused, scaled

SCALES = (
    "torch.log(i + 1.0).clamp(min=1.0)",
    "(torch.log(i + 1.0) / math.log(64)).clamp(min=1.0)",
    "torch.log(i + 1.0).clamp(min=math.log(256)) / math.log(256)",
    "torch.where(i >= 100, 1.5, 1.0)",
    "1 + 0.1 * torch.log1p(torch.floor(i / 128))",
    "torch.log1p(i // 100) * 0.3 + 1.0",
    "1.0 + (i > 300) * 1.0",
    "c.heads(0.5, 1.0, 2.0, 1.5)",
    "c.weight('heads', c.heads_count, 1, 1)",
    "1.0 / (h + 1)",
    "c.buf(0.7)",
    "-1.0",
)


@pytest.mark.few(3)
@pytest.mark.parametrize("text", SCALES)
def test_scales_of_scores(text: str) -> None:
    exact(scaled(text))


@pytest.mark.few(2)
@pytest.mark.parametrize("text", SCALES[::2])
def test_scales_of_queries(text: str) -> None:
    exact(scaled(text, "query"))


@pytest.mark.few(2)
@pytest.mark.parametrize("text", SCALES[:4])
def test_scales_of_padded_rows(text: str) -> None:
    exact(scaled(text, **BY_PLACES))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "text",
    [
        "torch.where(d > 100, 0.5, 1.0)",
        "1.0 / (1 + d.clamp(min=0) // 128)",
        "torch.exp(-d.abs() / 300)",
        "torch.where(j < 200, 1.0, 1.6)",
        "1 + 0.5 * torch.sin(j * 0.02)",
    ],
)
def test_scales_by_distance_and_key(text: str) -> None:
    exact(scaled(text))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "text",
    [
        "1 + c.at_q(c.linear('temp', c.heads_count).sigmoid())",
        "1 + c.at_k(c.linear('temp', c.heads_count).sigmoid())",
        "torch.where(c.at_q(c.hidden()), 2.0, 1.0)",
        "1 + c.at_q(ids % 7) * 0.1",
    ],
)
def test_scales_from_tokens(text: str) -> None:
    held(scaled(text), "scale|score|token|softmax")


@pytest.mark.few(2)
@pytest.mark.parametrize("text", ["torch.full((), 1.0) * n / 300", "(n + 0.0) ** 0.1", "1 + (n > 300) * 0.5"])
@pytest.mark.parametrize("where", ["scores", "query"])
def test_scales_by_the_length_of_the_text(text: str, where: str) -> None:
    refused(scaled(text, where), "length|size|position|sym|scale|score")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "response",
    [
        Part("softcap from a position on", (100,)),
        Part("softcap on half of the heads", (2.0,)),
        Part("softcap", (2.0,)),
        Part("clamped", (1.0,)),
        Part("leaky"),
        Part("absolute"),
    ],
)
def test_responses(response: Part) -> None:
    exact(decoder(Layer(response=response, spelling=EAGER)))


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["times and less", "one minus", "where"])
@pytest.mark.parametrize("name", ["leaky", "absolute"])
def test_what_a_score_chooses_is_no_mask(name: str, how: str) -> None:
    spelling = Part("eager", (how, -1e9, "matmul", "mask last"))
    mask = Part("written", ("(i >= j) & (d < 40 + (i >= 68) * 3)",))
    exact(decoder(Layer(mask=mask, response=Part(name), spelling=spelling)))


@pytest.mark.parametrize("hidden", [-1e9, float("-inf")])
def test_keys_hidden_by_their_scores_are_refused(hidden: float) -> None:
    refused(
        decoder(Layer(response=Part("the weak are hidden", (hidden,)), spelling=EAGER)),
        "its score|see no|sees no",
    )
