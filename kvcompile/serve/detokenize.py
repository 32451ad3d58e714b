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
from collections.abc import Sequence
from typing import Any, Protocol

from kvcompile.serve.vocabulary import BYTE, UNFINISHED, Vocabulary, bytes_of, vocabulary_of

_CONTEXT = 8  # tokens of the prompt that a window begins with


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
    vocabulary = vocabulary_of(tokenizer)
    return Bytes(vocabulary, prompt) if vocabulary.byte_level else Windows(vocabulary, prompt)


class NoText:
    """Without a tokenizer there is no text."""

    def take(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def forked(self) -> NoText:
        return self


class Bytes:
    """Tokens that spell bytes."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]):
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = False
        for token in _last(vocabulary, prompt, 4):  # a character has at most 4 bytes; the text may finish one
            self.take(token)
        self._half = self._decoder.getstate()[0] != b""

    def take(self, token: int) -> str:
        spelling = self._vocabulary.token(token)
        return "" if spelling is None else self._read(bytes_of(spelling))

    def flush(self) -> str:
        return self._read(b"", final=True)

    def _read(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._half and text:  # the prompt's half a character is the text's only where it is finished
            self._half = False
            return text.removeprefix(UNFINISHED)
        return text

    def forked(self) -> Bytes:
        other = object.__new__(Bytes)
        other._vocabulary = self._vocabulary
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        other._half = self._half
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
        if BYTE.match(spelling):
            return ""
        waiting = len(self._tokens) - self._read
        often = waiting <= 4 or waiting & (waiting - 1) == 0  # so that a token costs the same, whatever comes
        return self._advance() if often or self._vocabulary.clean(token) else ""

    def _advance(self) -> str:
        text = self._read_on()
        if text.endswith(UNFINISHED) or not text.startswith(self._context) or len(text) == len(self._context):
            return ""
        new = text[len(self._context) :]
        self._start, self._read = self._read, len(self._tokens)
        self._context = self._vocabulary.decode(self._tokens[self._start :])
        self._shown += len(new)
        return new

    def _read_on(self) -> str:
        """The text of the window; half a character that the prompt ends with is the text's, where it finishes it."""
        text = self._vocabulary.decode(self._tokens[self._start :])
        context = self._context
        while not text.startswith(context) and context.endswith(UNFINISHED):
            context = context[:-1]
        if text.startswith(context):
            self._shown -= len(self._context) - len(context)
            self._context = context
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
        if len(found) >= count and not BYTE.match(spelling):
            break
    return found[::-1]
