"""Needles in haystacks: a fact somewhere in a text that has nothing to do with it, and a question for it.

    <text> The secret number of the Oslo archive is 48213. <text>
    What is the secret number of the Oslo archive?          "after" the text, or "before" it

(G. Kamradt, "Needle in a haystack", 2023; numbers as in RULER, Hsieh et al. 2024, section 3.) A needle stands at the
end of the sentence nearest to its depth. Every needle has a stretch of the text, a city and a number of its own; both
orders of question and text have the same ones. Model and recipe decide nothing here.

The answer begins with the fact's own words, as a small model would otherwise go on about the text.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcompile.errors import QualityError
from kvcompile.report.quality.settings import Settings

CITIES = (
    "Amsterdam", "Athens", "Berlin", "Bogota", "Cairo", "Dublin", "Havana", "Helsinki", "Jakarta", "Lima", "Lisbon",
    "London", "Madrid", "Manila", "Nairobi", "Oslo", "Paris", "Prague", "Quito", "Rome", "Seoul", "Tokyo", "Vienna",
    "Warsaw",
)  # fmt: skip
FACT = "The secret number of the {city} archive is"
AFTER = "{text}\n\nWhat is the secret number of the {city} archive?"
BEFORE = "What is the secret number of the {city} archive? The answer is somewhere in this text:\n\n{text}"
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"\s+")


@dataclass(frozen=True)
class Needle:
    """One question.

    prompt: token ids; `lead`: the words that the answer begins with; `room`: tokens of an answer
    behind: tokens between the end of the fact and the end of the prompt, to within a token
    """

    depth: float
    ask: str
    number: str
    prompt: tuple[int, ...]
    lead: tuple[int, ...]
    room: int
    behind: int

    @property
    def tokens(self) -> int:
        """That a cache must hold."""
        return len(self.prompt) + len(self.lead) + self.room


def needles(tokenizer: Any, ids: Tensor, tokens: int, ask: str, settings: Settings) -> tuple[Needle, ...]:
    """All needles in stretches of `tokens` tokens of the text `ids` int64 [n], in the order of their depths."""
    return tuple(
        _needle(tokenizer, ids, tokens, ask, depth, random.Random(f"{settings.seed} {tokens} {depth} {i}"))
        for depth in map(float, settings.depths)
        for i in range(settings.needles)
    )


def digest(asked: tuple[Needle, ...]) -> str:
    """A hash of everything that is asked: text, tokenizer, template and wording are in the tokens."""
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def _needle(tokenizer: Any, ids: Tensor, tokens: int, ask: str, depth: float, draw: random.Random) -> Needle:
    city = draw.choice(CITIES)
    start = draw.randrange(len(ids) - tokens + 1)
    number = str(draw.randrange(10_000, 100_000))
    lead = FACT.format(city=city)
    fact = f"{lead} {number}."
    room = len(_encode(tokenizer, f" {number}.")) + 2
    size = tokens - len(_encode(tokenizer, f"\n\n{fact}\n\n"))
    text = tokenizer.decode(ids[start : start + size], clean_up_tokenization_spaces=False).strip()
    before, after = _split(text, depth)
    hidden = "\n\n".join(part for part in (before, fact, after) if part)
    question = (AFTER if ask == "after" else BEFORE).format(text=hidden, city=city)
    asked, plain = _chat(tokenizer, question)
    at = asked.find(fact)
    if at < 0:
        raise QualityError(["tokenizer: its chat template does not show a user's message as it is"])
    behind = asked[at + len(fact) :]
    return Needle(
        depth,
        ask,
        number,
        tuple(_encode(tokenizer, asked, special=plain)),
        tuple(_encode(tokenizer, lead)),
        room,
        len(_encode(tokenizer, behind)),
    )


def _split(text: str, depth: float) -> tuple[str, str]:
    """The text before and after the end of a sentence (else of a word) nearest to `depth`."""
    if depth in (0, 1):
        return ("", text) if depth == 0 else (text, "")
    ends = [m.span() for m in _SENTENCE.finditer(text)] or [m.span() for m in _WORD.finditer(text)]
    ends = [(0, 0), *ends, (len(text), len(text))]
    end, start = min(ends, key=lambda span: abs(span[0] - depth * len(text)))
    return text[:end], text[start:]


def _chat(tokenizer: Any, question: str) -> tuple[str, bool]:
    """The question as the model is used to get it, up to where its answer begins; and whether that is without a
    chat template, so that the tokenizer must add its special tokens."""
    if not getattr(tokenizer, "chat_template", None):
        return f"{question}\n\n", True
    message = [{"role": "user", "content": question}]
    text: str = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return text, False


def _encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    encoded: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return encoded
