"""What serving.py asks of an engine: requests of text nobody has seen, by a fixed seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

PROMPTS = (16, 512)  # tokens of a prompt, the least and the most
OUTPUTS = (16, 128)  # new tokens


@dataclass(frozen=True)
class Ask:
    """A prompt, and how many tokens are to follow, whatever they are; at: seconds after the first request."""

    prompt: list[int]
    new: int
    at: float = 0.0

    @property
    def tokens(self) -> int:
        """In the cache at the end: the last new token is not."""
        return len(self.prompt) + self.new - 1


class Text:
    """Tokens of real text, handed out piece by piece: no two pieces begin alike."""

    def __init__(self, tokenizer: Any):
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
        self._ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        self._place = 0

    def piece(self, tokens: int) -> list[int]:
        """The next tokens; around again at the end, one token further on."""
        if self._place + tokens > len(self._ids):
            self._ids = self._ids[1:]
            self._place = 0
        self._place += tokens
        return self._ids[self._place - tokens : self._place]


def offline(text: Text, requests: int = 32, seed: int = 0) -> list[Ask]:
    """Many requests at once, of all lengths."""
    draw = random.Random(seed)
    return [Ask(text.piece(draw.randint(*PROMPTS)), draw.randint(*OUTPUTS)) for _ in range(requests)]


def poisson(asks: list[Ask], per_second: float, seed: int = 0) -> list[Ask]:
    """The same requests, which come whenever they like, so many a second."""
    draw, at, found = random.Random(seed), 0.0, []
    for ask in asks:
        found.append(Ask(ask.prompt, ask.new, at))
        at += draw.expovariate(per_second)
    return found


def same_lengths(text: Text, requests: int, prompt: int, new: int) -> list[Ask]:
    return [Ask(text.piece(prompt), new) for _ in range(requests)]
