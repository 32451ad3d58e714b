"""Cause 5: ids were probed as 0 and 1. Masks that ids decide, whichever the separator or special id is."""

from __future__ import annotations

import pytest

from tests.fuzz.parts import Part
from tests.fuzz.spec import Layer, Special
from tests.soundness.checks import BY_PLACES, EAGER, decoder, exact, held, masked, shown

DOCUMENTS = (
    "c.at_q(c.doc()) == c.at_k(c.doc())",
    "c.at_q(c.doc_after()) == c.at_k(c.doc_after())",
    "~(c.at_q(c.doc()) != c.at_k(c.doc()))",
    "c.at_q(c.doc()) - c.at_k(c.doc()) < 2",
    "(c.at_q(c.doc()) == c.at_k(c.doc())) & (d < 64)",
    "(c.at_q(c.doc()) == c.at_k(c.doc())) | (j < 4)",
)
HIDDEN = (
    "~c.at_k(c.hidden()) | (d == 0)",
    "(c.at_k(ids) != c.model.spec.special.hidden) | (d == 0)",
    "c.at_k(ids < c.model.spec.vocab - 6) | (d == 0)",
    "c.at_k(ids % 13 != 4) | (d == 0)",
    "~torch.isin(c.at_k(ids), torch.tensor([7, 19, 33, 52])) | (d == 0)",
    "~(c.at_k(c.hidden()) & (d > 40))",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("condition", DOCUMENTS)
def test_documents(condition: str) -> None:
    exact(masked(condition))


@pytest.mark.few(2)
@pytest.mark.parametrize("condition", HIDDEN)
def test_hidden_ids(condition: str) -> None:
    exact(masked(condition))


@pytest.mark.few(2)
@pytest.mark.parametrize("special", [Special(sep=0), Special(sep=1), Special(sep=60), Special(sep=299)])
def test_any_separator(special: Special) -> None:
    exact(masked(DOCUMENTS[0], special=special, vocab=300))


@pytest.mark.parametrize("condition", [DOCUMENTS[0], DOCUMENTS[3], HIDDEN[0]])
def test_ids_in_eager_masks(condition: str) -> None:
    exact(masked(condition, eager=True))


@pytest.mark.few(3)
@pytest.mark.parametrize("condition", [DOCUMENTS[0], HIDDEN[0], "c.at_q(c.since()) >= d"])
@pytest.mark.parametrize("pad_id", [5, 11, 0])
def test_ids_of_padded_rows(condition: str, pad_id: int) -> None:
    """A separator among the padding counts for nothing that is compared."""
    held(masked(condition, pad_id=pad_id, **BY_PLACES))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "condition",
    [
        "d <= c.at_q(c.since())",
        "(c.at_k(c.since()) < 5) | (d < 20)",
        "~c.at_q(c.hidden()) | (d < 9)",
        "(c.at_q(ids) >= c.at_k(ids) - 50) | (d == 0)",
        "(c.at_q(ids) != c.at_k(ids)) | (d == 0)",
        "(c.at_q(ids) > 30) | (d < 100)",
    ],
)
def test_queries_by_id(condition: str) -> None:
    held(masked(condition))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "text",
    [
        "(i >= j) | ((c.at_q(c.span()) == c.at_k(c.span())) & c.at_q(c.image()))",
        "(i >= j) | (c.at_q(c.image()) & c.at_k(c.image()))",
        "(i >= j) | (c.at_q(c.image()) & c.at_k(c.image()) & (d > -4))",
        "(i >= j) | c.at_k(c.hidden())",
        "(i >= j) | (c.at_q(ids) == c.at_k(ids))",
        "((i >= j) & (d < 60)) | ((c.at_q(c.span()) == c.at_k(c.span())) & (c.at_q(c.span()) > 0))",
    ],
)
def test_tokens_that_see_later_ones(text: str) -> None:
    """A span that lies within a chunk could be held; this text's chunks cut some, and nothing may be wrong."""
    held(shown(text), "future|bidirectional|sees|later|token|chunk")


@pytest.mark.parametrize("name", ["values hidden by id", "normed keys"])
def test_values_by_id(name: str) -> None:
    exact(decoder(Layer(keys=Part(name), spelling=EAGER)))


@pytest.mark.parametrize("name", ["ids hide states", "two lookups"])
def test_states_by_id(name: str) -> None:
    exact(decoder(mixer=Part(name)))
