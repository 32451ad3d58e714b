"""What is known of a tokenizer's tokens, found once: how each is spelled, and what it adds to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

UNFINISHED = "\ufffd"
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")  # of byte fallback


@lru_cache(8)
def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Kept for the latest tokenizers."""
    return Vocabulary(tokenizer)


class Vocabulary:
    """The tokens of one tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self.byte_level = _decoder(tokenizer) == "ByteLevel"
        self._spelled = {token: spelling for spelling, token in tokenizer.get_vocab().items()}
        self._clean: dict[int, bool] = {}

    def token(self, token: int) -> str | None:
        """The token as the vocabulary spells it; None: decoding leaves it out, or it is of the model alone."""
        return None if token in self.special else self._spelled.get(token)

    def clean(self, token: int) -> bool:
        """Whether it has a text of its own, of whole characters."""
        if token not in self._clean:
            text = self.decode([token])
            self._clean[token] = text != "" and UNFINISHED not in text
        return self._clean[token]

    def decode(self, tokens: Sequence[int]) -> str:
        """All of it; spaces before punctuation stay, as what is shown cannot be taken back."""
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def spellings(tokenizer: Any, count: int) -> list[bytes]:
    """What each id below `count` adds in the middle of a text; nothing where it depends on what stands beside it."""
    vocabulary = vocabulary_of(tokenizer)
    tokens = [vocabulary.token(token) for token in range(count)]
    if vocabulary.byte_level:
        return [b"" if spelling is None else bytes_of(spelling) for spelling in tokens]
    beside = next((token for token in range(count) if tokens[token] and vocabulary.clean(token)), None)
    return [
        b"" if spelling is None or beside is None else _between(vocabulary, token, spelling, beside)
        for token, spelling in enumerate(tokens)
    ]


def _between(vocabulary: Vocabulary, token: int, spelling: str, beside: int) -> bytes:
    """The text of a token between two others, if it has one of its own there."""
    if BYTE.match(spelling) and vocabulary.decode([token]) != spelling:
        return bytes([int(spelling[3:5], 16)])
    before, pair, after = (vocabulary.decode(t) for t in ([beside], [beside, token], [beside, token, beside]))
    twice = vocabulary.decode([beside, beside])
    if not (pair.startswith(before) and twice.startswith(before) and UNFINISHED not in pair):
        return b""
    return pair[len(before) :].encode() if after == pair + twice[len(before) :] else b""


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


def bytes_of(spelling: str) -> bytes:
    """What a token stands for; one with a character that is no byte (added by hand) stands for itself."""
    table = _byte_of()
    try:
        return bytes(table[character] for character in spelling)
    except KeyError:
        return spelling.encode()
