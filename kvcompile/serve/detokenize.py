"""Text of tokens that come one by one: all pieces joined are what decoding everything at once gives.

| decoder of the tokenizer | how |
|---|---|
| ByteLevel (GPT-2, Llama 3, Qwen, SmolLM) | the bytes of each token, through an incremental UTF-8 decoder |
| any other, fast or slow | the last tokens are decoded with a few before them, and what is new is handed out |

Windows are exact where a decoder looks at neighbours alone (WordPiece, Metaspace, byte fallback, ...). A byte of byte
fallback (`<0xE2>`) changes how all bytes that touch it are read, so a run of them waits for its end. What ends in
U+FFFD may be half a character, and waits. In the end everything is decoded once, and what windows did not know comes
then.

Text follows a prompt: a leading space that a tokenizer drops at the start of a text stays in the middle of one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

_CONTEXT = 8  # tokens of the prompt that a window begins with
_UNFINISHED = "�"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


class Detokenizer(Protocol):
    """The text of one sequence of tokens."""

    def take(self, token: int) -> str:
        """What is certain by now and was not handed out before."""

    def flush(self) -> str:
        """What is left, as nothing follows."""

    def forked(self) -> Detokenizer: ...


def detokenizer(tokenizer: Any | None, prompt: Sequence[int]) -> Detokenizer:
    """For the text that follows a prompt."""
    if tokenizer is None:
        return NoText()
    vocabulary = _vocabulary(tokenizer)
    return Bytes(vocabulary, prompt) if vocabulary.byte_level else Windows(vocabulary, prompt)


def spellings(tokenizer: Any, count: int) -> list[bytes]:
    """What each id below `count` adds in the middle of a text; nothing where it depends on what stands beside it."""
    vocabulary = _vocabulary(tokenizer)
    tokens = [vocabulary.token(token) for token in range(count)]
    if vocabulary.byte_level:
        return [b"" if spelling is None else _bytes(spelling) for spelling in tokens]
    beside = next((token for token in range(count) if tokens[token] and vocabulary.clean(token)), None)
    return [
        b"" if spelling is None or beside is None else _between(vocabulary, token, spelling, beside)
        for token, spelling in enumerate(tokens)
    ]


def _between(vocabulary: Vocabulary, token: int, spelling: str, beside: int) -> bytes:
    """The text of a token between two others, if it has one of its own there."""
    if _BYTE.match(spelling) and vocabulary.decode([token]) != spelling:
        return bytes([int(spelling[3:5], 16)])
    before, pair, after = (vocabulary.decode(t) for t in ([beside], [beside, token], [beside, token, beside]))
    twice = vocabulary.decode([beside, beside])
    if not (pair.startswith(before) and twice.startswith(before) and _UNFINISHED not in pair):
        return b""
    return pair[len(before) :].encode() if after == pair + twice[len(before) :] else b""


class NoText:
    """Without a tokenizer there is no text."""

    def take(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def forked(self) -> NoText:
        return self


class Vocabulary:
    """What is known of a tokenizer's tokens, found once each."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self.byte_level = _decoder(tokenizer) == "ByteLevel"
        self._size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._known: dict[int, str | None] = {}
        self._clean: dict[int, bool] = {}

    def token(self, token: int) -> str | None:
        """The token as the vocabulary spells it; None: decoding leaves it out."""
        if token not in self._known:
            nothing = (
                token >= self._size or token in self.special
            )  # a model may have more ids than its tokenizer
            self._known[token] = None if nothing else self.tokenizer.convert_ids_to_tokens(token)
        return self._known[token]

    def clean(self, token: int) -> bool:
        """Whether it has a text of its own, of whole characters."""
        if token not in self._clean:
            text = self.decode([token])
            self._clean[token] = text != "" and _UNFINISHED not in text
        return self._clean[token]

    def decode(self, tokens: Sequence[int]) -> str:
        """All of it; spaces before punctuation stay, as what is shown cannot be taken back."""
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Bytes:
    """Tokens that spell bytes."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]):
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in _last(vocabulary, prompt, 4):  # a character has at most 4 bytes; the text may finish one
            self.take(token)

    def take(self, token: int) -> str:
        spelling = self._vocabulary.token(token)
        return "" if spelling is None else self._decoder.decode(_bytes(spelling))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def forked(self) -> Bytes:
        other = object.__new__(Bytes)
        other._vocabulary = self._vocabulary
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other


class Windows:
    """Tokens of any tokenizer: [start, read) is context whose text is out, [read, end) waits."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]):
        self._vocabulary = vocabulary
        self._tokens = _last(vocabulary, prompt, _CONTEXT)
        self._start, self._read = 0, len(self._tokens)
        self._context = vocabulary.decode(self._tokens)
        self._shown = len(self._context)

    def take(self, token: int) -> str:
        spelling = self._vocabulary.token(token)
        if spelling is None:
            return ""
        self._tokens.append(token)
        if _BYTE.match(spelling):
            return ""
        waiting = len(self._tokens) - self._read
        often = waiting <= 4 or waiting & (waiting - 1) == 0  # so that a token costs the same, whatever comes
        return self._advance() if often or self._vocabulary.clean(token) else ""

    def _advance(self) -> str:
        text = self._vocabulary.decode(self._tokens[self._start :])
        if (
            text.endswith(_UNFINISHED)
            or not text.startswith(self._context)
            or len(text) == len(self._context)
        ):
            return ""
        new = text[len(self._context) :]
        self._start, self._read = self._read, len(self._tokens)
        self._context = self._vocabulary.decode(self._tokens[self._start :])
        self._shown += len(new)
        return new

    def _read_on(self) -> str:
        """The text of the window; half a character that the prompt ends with is the text's, where it finishes it."""
        text = self._vocabulary.decode(self._tokens[self._start :])
        whole = self._context.rstrip(_UNFINISHED)
        if not text.startswith(self._context) and text.startswith(whole):
            self._shown -= len(self._context) - len(whole)
            self._context = whole
        return text

    def flush(self) -> str:
        self._read_on()
        whole = self._vocabulary.decode(self._tokens)
        new = whole[self._shown :]
        self._start = self._read = len(self._tokens)
        self._context, self._shown = "", max(self._shown, len(whole))
        return new

    def forked(self) -> Windows:
        other = object.__new__(Windows)
        other.__dict__.update(self.__dict__)
        other._tokens = list(self._tokens)
        return other


def _last(vocabulary: Vocabulary, prompt: Sequence[int], count: int) -> list[int]:
    """The last tokens of a prompt that have a spelling, with the whole run of bytes that they begin in."""
    found: list[int] = []
    for token in reversed(prompt):
        spelling = vocabulary.token(token)
        if spelling is None:
            continue
        found.append(token)
        if len(found) >= count and not _BYTE.match(spelling):
            break
    return found[::-1]


@lru_cache(8)
def _vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer)


def _decoder(tokenizer: Any) -> str | None:
    """The kind of a fast tokenizer's decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return None
    try:
        return str(json.loads(decoder.__getstate__())["type"])
    except (TypeError, ValueError, KeyError):  # one written in Python
        return None


@lru_cache(1)
def _byte_of() -> dict[str, int]:
    """Which byte a character of a byte-level vocabulary stands for: Radford et al. 2019, GPT-2's encoder."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _bytes(spelling: str) -> bytes:
    """What a token stands for; one with a character that is no byte (added by hand) stands for itself."""
    table = _byte_of()
    try:
        return bytes(table[character] for character in spelling)
    except KeyError:
        return spelling.encode()
