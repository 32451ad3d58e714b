"""What ended in an error that was none of kvcompile's own, and forms of output."""

from __future__ import annotations

import pytest

from tests.fuzz.parts import Part
from tests.fuzz.spec import Layer
from tests.soundness.checks import EAGER, ROPE, decoder, exact, held, refused


@pytest.mark.few(3)
@pytest.mark.parametrize("verify", ["off", "quick"])
@pytest.mark.parametrize(
    "output", ["the last token's", "the last token's, flat", "states", "a mean", "less what was seen"]
)
def test_outputs_that_are_no_logits_of_every_token(output: str, verify: str) -> None:
    held(decoder(output=Part(output)), verify=verify)


@pytest.mark.few(3)
@pytest.mark.parametrize("verify", ["off", "quick"])
@pytest.mark.parametrize(
    "output", ["a tuple", "a dictionary", "a dictionary, hidden first", "a record", "with no loss"]
)
def test_outputs(output: str, verify: str) -> None:
    exact(decoder(output=Part(output)), verify)


@pytest.mark.few(3)
@pytest.mark.parametrize("how", ["zeros", "full", "scatter"])
@pytest.mark.parametrize("k", [8, 64])
@pytest.mark.parametrize("verify", ["off", "quick"])
def test_masks_scattered_into_new_tensors(how: str, k: int, verify: str) -> None:
    exact(decoder(Layer(select=Part("indexer", (k, how)))), verify)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    held(decoder(dtype=dtype, position=ROPE), "dtype|float64")


SOFTMAXES = (
    "sigmoid",
    "relu squared",
    "over the queries",
    "over halves",
    "off by one",
    "off by one, a column",
    "one sink, first",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_forms_of_softmax(softmax: str) -> None:
    held(decoder(Layer(softmax=Part(softmax), spelling=EAGER)), "softmax|mix|attention")


@pytest.mark.few(2)
@pytest.mark.parametrize("text", ["c.at_q(c.linear('sinks', c.heads_count))", "0.01 * (i - 100.0) + 0 * h"])
@pytest.mark.parametrize("recipe", ["baseline", "paged"])
def test_sinks_of_queries(text: str, recipe: str) -> None:
    softmax = Part("sinks of queries", (text,))
    exact(decoder(Layer(softmax=softmax, spelling=EAGER), recipe=recipe))


@pytest.mark.parametrize(
    "text", ["c.at_k(c.linear('sinks', 1)).mean(-1, keepdim=True)", "torch.full((), 1.0) * n + 0 * i"]
)
def test_sinks_of_the_whole_text_are_refused(text: str) -> None:
    refused(decoder(Layer(softmax=Part("sinks of queries", (text,)), spelling=EAGER)), "sink|tokens|length")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "weights",
    ["talking heads", "squared", "a floor", "a threshold", "less the mean", "summed over queries", "dropout"],
)
def test_what_follows_the_softmax(weights: str) -> None:
    held(decoder(Layer(weights=Part(weights), spelling=EAGER)), "softmax|mix|weigh|attention")
