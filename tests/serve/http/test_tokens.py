"""Texts and bytes of single tokens, over the kinds of tokenizers that there are."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvcompile.serve.http.replies import logprobs
from kvcompile.serve.http.tokens import TokenTexts, piece_bytes
from kvcompile.serve.request import TokenLogprob


def byte_level() -> Any:
    """GPT-2's kind: every byte is a letter, and no pair is merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def byte_fallback() -> Any:
    """Llama's kind: pieces of words, and tokens of bytes for the rest; the first space of a text is dropped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁the", "b"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    merges = [("▁", "a")] if "▁a" in vocabulary else []
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_bytes_of_all_tokens_are_those_of_the_text(kind: Any) -> None:
    tokenizer = kind()
    texts = TokenTexts(tokenizer)
    text = "ab a€ü𝄞 b"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    raw = [texts.utf8(token) for token in ids]
    assert all(one is not None for one in raw)
    assert b"".join(bytes(one or []) for one in raw).decode().lstrip() == text
    shown = [texts.text(token) for token in ids]
    assert "bytes:\\xe2" in shown and "bytes:\\x82" in shown and "\ufffd" not in "".join(shown)


def test_a_space_that_a_word_begins_with_is_told() -> None:
    tokenizer = byte_fallback()
    texts = TokenTexts(tokenizer)
    token = tokenizer.convert_tokens_to_ids("▁the")
    assert tokenizer.decode([token]) == "the"  # as the first word of a text
    assert texts.text(token) == " the" and bytes(texts.utf8(token) or []) == b" the"


def test_letters_of_bytes_are_those_of_the_tokenizers() -> None:
    """All 256, against the library's own pre-tokenizer."""
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in range(0x100):
        ((piece, _),) = own.pre_tokenize_str(chr(code))
        assert piece_bytes(piece) == chr(code).encode()
    assert len({piece_bytes(letter) for letter in pre_tokenizers.ByteLevel.alphabet()}) == 256
    assert piece_bytes("<0xE2>") == b"\xe2"
    assert piece_bytes("▁the") is None and piece_bytes("") is None and piece_bytes(None) is None


def test_tokens_of_one_text_are_told_as_the_likeliest() -> None:
    class Same:
        def text(self, token: int) -> str:
            return "x"

    found, offset = logprobs.of_completion([TokenLogprob(1, -3.0, ((2, -1.0), (3, -2.0)))], Same(), 4)  # type: ignore[arg-type]
    assert found["top_logprobs"] == [{"x": -1.0}] and found["text_offset"] == [4] and offset == 5
