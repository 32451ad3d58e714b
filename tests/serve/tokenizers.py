"""Tokenizers of every kind that tests of serving share: SmolLM2's, and tiny ones."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import kvcompile.models as models

NAMES = ["smollm2", "bytes", "fallback", "python", "python bytes", "byt5", "metaspace", "wordpiece", "suffix"]


@lru_cache
def smollm2() -> Any:
    """SmolLM2's tokenizer alone: the converted checkpoint's where there is one, which loads without the model."""
    file = models._locate("smollm2")
    folder = models._cached(file)
    return models.load_model("smollm2").tokenizer if folder is None else models._tokenizer(folder)


class InPython(PreTrainedTokenizer):
    """A slow tokenizer: words with ▁, bytes by fallback, as SentencePiece models are."""

    words = ("<unk>", "<s>", "▁", "▁a", "b", "▁é", "�", "c▁")
    pieces = (*words, *(f"<0x{byte:02X}>" for byte in range(256)))

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        return {piece: place for place, piece in enumerate(self.pieces)}

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self.pieces[index]

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ).decode(tokens)


LETTERS = bytes_to_unicode()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


class BytesInPython(InPython):
    """A slow tokenizer of bytes; half a character is U+FFFD."""

    pieces = ("<unk>", "<s>", *LETTERS.values())

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [LETTERS[byte] for byte in text.encode()]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(bytes([BYTES[t]]) if t in BYTES else t.encode() for t in tokens).decode(
            errors="replace"
        )


def fast(model: Any, decoder: Any, **more: Any) -> Any:
    made = Tokenizer(model)
    made.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=made, **more)


@lru_cache
def tokenizer(name: str) -> Any:
    special = {"unk_token": "<unk>", "bos_token": "<s>"}
    pieces = InPython.pieces
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    if name == "smollm2":
        return smollm2()
    if name == "python":
        return InPython(**special)
    if name == "python bytes":
        return BytesInPython(**special)
    if name == "byt5":
        return ByT5Tokenizer()
    if name == "fallback":
        steps = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        return fast(BPE(vocabulary, [], unk_token="<unk>"), decoders.Sequence(steps), **special)
    if name == "metaspace":
        return fast(Unigram([(piece, -1.0) for piece in pieces[:8]], 0), decoders.Metaspace(), **special)
    if name == "wordpiece":
        words = ["<unk>", "<s>", "a", "##b", ".", "n't", "##é", "don"]
        model = WordPiece({word: place for place, word in enumerate(words)}, unk_token="<unk>")
        return fast(model, decoders.WordPiece(), **special)
    if name == "suffix":
        words = ["<unk>", "<s>", "a</w>", "b", "é</w>", "c"]
        model = BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>")
        return fast(model, decoders.BPEDecoder(), **special)
    assert name == "bytes"  # every byte, and tokens that were added by hand
    letters = {letter: place for place, letter in enumerate(bytes_to_unicode().values())}
    made = fast(BPE(letters, []), decoders.ByteLevel(), bos_token="<s>")
    made.add_tokens([AddedToken("<think é>"), AddedToken("x y")])
    return made
