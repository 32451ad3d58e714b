"""A token's text and bytes, as log-probabilities tell them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character


class TokenTexts:
    """Texts and bytes of single tokens of a tokenizer; None: of ids alone, which have neither."""

    def __init__(self, tokenizer: Any | None):
        self._tokenizer = tokenizer
        self._found = lru_cache(1 << 16)(self._find)
        self._before: tuple[int, str] | None = None

    def text(self, token: int) -> str:
        """The token's text; "bytes:\\xe2\\x82" where it is a part of a character, as OpenAI writes it."""
        return self._found(token)[0]

    def utf8(self, token: int) -> list[int] | None:
        """The token's bytes in UTF-8; None where they are not known."""
        found = self._found(token)[1]
        return None if found is None else list(found)

    def decode(self, tokens: list[int]) -> str:
        """The text of many tokens; special ones are written out."""
        if self._tokenizer is None:
            return ""
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _find(self, token: int) -> tuple[str, bytes | None]:
        if self._tokenizer is None:
            return f"token_id:{token}", None
        text = self._alone(token)
        if _BROKEN not in text:
            return text, text.encode()
        raw = piece_bytes(self._tokenizer.convert_ids_to_tokens(token))
        if raw is None:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _alone(self, token: int) -> str:
        """Its text behind another token: decoders of words drop the space that a text begins with."""
        if self._before is None:
            ids = self._tokenizer("a", add_special_tokens=False)["input_ids"] if self._tokenizer else []
            self._before = (ids[-1], self.decode([ids[-1]])) if ids else (-1, "")
        before, prefix = self._before
        both = self.decode([before, token]) if before >= 0 else ""
        return both.removeprefix(prefix) if prefix and both.startswith(prefix) else self.decode([token])


def piece_bytes(piece: str | None) -> bytes | None:
    """Bytes of a piece that is no text by itself: `<0xE2>`, or letters that stand for bytes (GPT-2's alphabet)."""
    if not piece:
        return None
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes([int(match[1], 16)])
    letters = _letters()
    return bytes(letters[one] for one in piece) if all(one in letters for one in piece) else None


@lru_cache(1)
def _letters() -> dict[str, int]:
    """The byte of each letter of GPT-2's alphabet."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
