"""Texts as they come: pieces joined are what decoding everything gives, cut by whatever ends a text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.serve.ends import Ends, Piece
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.stops import Stops
from tests.serve.tokenizers import NAMES, smollm2, tokenizer

BYTE_LEVEL = ("smollm2", "bytes", "python bytes")
LONG = Sampling(max_tokens=10_000)


def decode(name: str, tokens: Sequence[int]) -> str:
    return str(
        tokenizer(name).decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def text_after(name: str, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """What decoding prompt and text at once has after the prompt's own; half a character that it finishes is its."""
    before, whole = decode(name, prompt), decode(name, [*prompt, *tokens])
    return whole[len(before) - (not whole.startswith(before)) :]


def pieces(ends: Ends, tokens: Sequence[int]) -> tuple[str, str | None, int]:
    """(text, why it ended, tokens that were taken)."""
    text = ""
    for count, token in enumerate(tokens, 1):
        piece = ends.take(token)
        text += piece.text
        if piece.finish:
            assert ends.flush() == ""
            return text, piece.finish, count
    return text + ends.flush(), None, len(tokens)


def ids(name: str) -> st.SearchStrategy[list[int]]:
    """Ids of a tokenizer, and those of words and half characters more often."""
    size = len(tokenizer(name))
    few = st.sampled_from(range(min(size, 12)))
    some: st.SearchStrategy[int] = st.one_of(few, st.integers(0, size - 1))
    if name in BYTE_LEVEL:
        characters = [*"é€😀𝄞a ", "﷽", "\n"]
        return st.lists(
            st.one_of(
                some.map(lambda token: [token]),
                st.sampled_from(characters).map(
                    lambda text: tokenizer(name)(text, add_special_tokens=False).input_ids
                ),
            ),
            max_size=20,
        ).map(lambda parts: [token for part in parts for token in part])
    return st.lists(some, max_size=30)


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@settings(max_examples=150)
def test_pieces_joined_are_the_whole_text(name: str, data: st.DataObject) -> None:
    tokens = data.draw(ids(name))
    text, finish, _ = pieces(Ends(LONG, frozenset(), tokenizer(name), []), tokens)
    assert text == decode(name, tokens)
    assert finish is None


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@settings(max_examples=100)
def test_text_goes_on_from_its_prompt(name: str, data: st.DataObject) -> None:
    prompt, tokens = data.draw(ids(name)), data.draw(ids(name))
    if (
        name in ("fallback", "python")
        and tokenizer(name).convert_ids_to_tokens(prompt[-1:] or [2])[0][0] == "<"
    ):
        tokens = [3, *tokens]  # bytes that touch the prompt's would change what the prompt decodes to
    text, _, _ = pieces(Ends(LONG, frozenset(), tokenizer(name), prompt), tokens)
    assert text == text_after(name, prompt, tokens)


@pytest.mark.parametrize("name", ["smollm2", "fallback", "wordpiece"])
@given(st.data())
@settings(max_examples=60)
def test_forks_have_the_same_past_and_futures_of_their_own(name: str, data: st.DataObject) -> None:
    past, one, two = data.draw(ids(name)), data.draw(ids(name)), data.draw(ids(name))
    first = Ends(LONG, frozenset(), tokenizer(name), [])
    text = "".join(first.take(token).text for token in past)
    second = first.forked()
    assert text + pieces(first, one)[0] == decode(name, past + one)
    assert text + pieces(second, two)[0] == decode(name, past + two)


def test_whole_characters_come_at_once() -> None:
    words = smollm2()("Two words, and some more: naïve 😀 done.").input_ids
    ends = Ends(LONG, frozenset(), smollm2(), [])
    text = ""
    for count, token in enumerate(words, 1):
        text += ends.take(token).text
        # A space waits for what it is with where a tokenizer has more than bytes (transformers 5.17, from GGUF files).
        assert text.rstrip() == decode("smollm2", words[:count]).rstrip("� ")
    assert text == decode("smollm2", words)


def test_a_leading_space_stays_in_the_middle_of_a_text() -> None:
    made = tokenizer("fallback")
    assert [made.decode([3]), made.decode([3, 3])] == ["a", "a a"]
    assert pieces(Ends(LONG, frozenset(), made, [1]), [3, 4])[0] == "ab"
    assert pieces(Ends(LONG, frozenset(), made, [1, 3]), [3, 4])[0] == " ab"


@pytest.mark.parametrize("name", ["fallback", "byt5", "python", "python bytes"])
@pytest.mark.parametrize("kind", ["bytes that are no text", "words", "specials"])
def test_a_token_costs_the_same_however_long_the_text_is(name: str, kind: str, monkeypatch: Any) -> None:
    from kvcompile.serve.vocabulary import Vocabulary

    decoded = [0]
    real = Vocabulary.decode

    def counted(self: Any, tokens: Sequence[int]) -> str:
        decoded[0] += len(tokens)
        return real(self, tokens)

    monkeypatch.setattr(Vocabulary, "decode", counted)
    made = tokenizer(name)
    token = {"bytes that are no text": 8 + 0xFF, "words": 3, "specials": 1}[kind]
    if name in ("byt5", "python bytes") and kind != "specials":
        token = made.convert_tokens_to_ids("a" if kind == "words" else "ÿ")
    count = 4000
    text, _, _ = pieces(Ends(LONG, frozenset(), made, []), [token] * count)
    assert decoded[0] <= 20 * count + 100
    assert text == decode(name, [token] * count)


def test_without_a_tokenizer_there_is_no_text() -> None:
    ends = Ends(Sampling(max_tokens=3, stop=("a",)), frozenset({5}), None, [1, 2])
    assert [ends.take(1), ends.forked().take(5), ends.take(2), ends.take(3)] == [
        Piece(""),
        Piece("", "stop"),
        Piece(""),
        Piece("", "length"),
    ]


# ---- stop strings


def cut(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first; None: there is none."""
    for end in range(1, len(text) + 1):
        ended = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(ended)]
    return None


strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(st.lists(st.text("ab", max_size=4), max_size=12), strings)
@settings(max_examples=500)
def test_stop_strings_are_never_shown_and_all_else_is(parts: list[str], stops: list[str]) -> None:
    scanner, shown, whole = Stops(stops), "", "".join(parts)
    expected = cut(whole, stops)
    for count, part in enumerate(parts, 1):
        new, stopped = scanner.take(part)
        shown += new
        assert shown == whole[: len(shown)]
        assert stopped == (cut("".join(parts[:count]), stops) is not None)
        if stopped:
            assert shown == expected
            return
        so_far = "".join(parts[:count])
        waits = max((n for s in stops for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
        assert shown == so_far[: len(so_far) - waits]  # no more is held back than must be
    assert expected is None
    assert shown + scanner.flush() == whole


@pytest.mark.parametrize("name", ["smollm2", "fallback", "wordpiece"])
@given(st.data())
@settings(max_examples=150)
def test_stop_strings_in_texts_of_tokens(name: str, data: st.DataObject) -> None:
    tokens = data.draw(ids(name).filter(bool))
    whole = decode(name, tokens)
    inside = st.integers(0, max(0, len(whole) - 1)).flatmap(
        lambda start: st.integers(1, 6).map(lambda size: whole[start : start + size] or "x")
    )
    stops = data.draw(st.lists(st.one_of(inside, st.text("aé ", min_size=1, max_size=3)), max_size=3))
    sampling = Sampling(max_tokens=len(tokens), stop=tuple(stops))
    text, finish, _ = pieces(Ends(sampling, frozenset(), tokenizer(name), []), tokens)
    expected = cut(whole, stops)
    assert (text, finish) == ((whole, "length") if expected is None else (expected, "stop"))


def test_a_long_stop_string_costs_no_more() -> None:
    stop = "a" * 20_000 + "b"
    scanner = Stops([stop])
    start = time.process_time()
    shown = "".join(scanner.take("a" * 50)[0] for _ in range(2_000))
    assert len(shown) == 100_000 - 20_000
    assert scanner.take("b") == ("", True)
    assert time.process_time() - start < 20  # a scan of what is held, each time, takes minutes


# ---- why a text ends


def test_ids_that_end_a_text() -> None:
    a, b = smollm2()("a b", add_special_tokens=False).input_ids
    eos = frozenset({2})
    assert pieces(Ends(LONG, eos, smollm2(), []), [a, 2, b]) == ("a", "stop", 2)
    ignoring = Sampling(max_tokens=3, ignore_eos=True)
    assert pieces(Ends(ignoring, eos, smollm2(), []), [a, 2, b]) == ("a b", "length", 3)
    by_id = Sampling(stop_token_ids=(b,), ignore_eos=True)
    assert pieces(Ends(by_id, eos, smollm2(), []), [a, 2, b]) == ("a", "stop", 3)


@pytest.mark.parametrize(("most", "room", "taken"), [(3, None, 3), (3, 2, 2), (2, 9, 2), (1, 1, 1)])
def test_the_largest_number_of_tokens(most: int, room: int | None, taken: int) -> None:
    tokens = smollm2()("a b c d e", add_special_tokens=False).input_ids
    text, finish, count = pieces(Ends(Sampling(max_tokens=most), frozenset(), smollm2(), [], room), tokens)
    assert (text, finish, count) == (decode("smollm2", tokens[:taken]), "length", taken)


def test_the_last_token_hands_out_what_was_held_back() -> None:
    half = smollm2()("😀", add_special_tokens=False).input_ids[:1]
    assert pieces(Ends(Sampling(max_tokens=1), frozenset(), smollm2(), []), half) == ("�", "length", 1)
    a, b = smollm2()("a b", add_special_tokens=False).input_ids
    held = Sampling(max_tokens=2, stop=("b c",))
    assert pieces(Ends(held, frozenset(), smollm2(), []), [a, b]) == ("a b", "length", 2)
    assert pieces(Ends(held, frozenset({2}), smollm2(), []), [b, 2]) == (" b", "stop", 2)
    at_the_end = Sampling(max_tokens=1, stop=("�",))
    assert pieces(Ends(at_the_end, frozenset(), smollm2(), []), half) == ("", "stop", 1)


def test_a_stop_comes_before_the_largest_number() -> None:
    a, b = smollm2()("a b", add_special_tokens=False).input_ids
    assert pieces(Ends(Sampling(max_tokens=2, stop=" b"), frozenset(), smollm2(), []), [a, b]) == (
        "a",
        "stop",
        2,
    )
    assert pieces(Ends(Sampling(max_tokens=2), frozenset({b}), smollm2(), []), [a, b]) == ("a", "stop", 2)


def test_cancelled_texts_hand_out_what_was_held_back() -> None:
    a, b = smollm2()("a b", add_special_tokens=False).input_ids
    ends = Ends(Sampling(stop=(" bc",)), frozenset(), smollm2(), [])
    assert [ends.take(a).text, ends.take(b).text, ends.flush(), ends.flush()] == ["a", "", " b", ""]
    with pytest.raises(RuntimeError, match="has ended"):
        ends.take(a)
