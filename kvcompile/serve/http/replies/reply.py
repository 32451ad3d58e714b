"""What both kinds of answers have in common: their head, their usage, and the parts of answers and of streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompile.serve.http.prompts import Prompt
from kvcompile.serve.http.schemas.generation import Generation
from kvcompile.serve.http.tokens import TokenTexts
from kvcompile.serve.request import Completion, Delta, Result


@dataclass
class Reply(ABC):
    """The answer to one request.

    created: seconds since 1970
    """

    id: str
    created: int
    model: str
    asked: Generation
    prompts: Sequence[Prompt]
    texts: TokenTexts

    ID: ClassVar[str]
    KIND: ClassVar[str]
    CHUNK: ClassVar[str]

    @abstractmethod
    def choice(self, prompt: int, completion: Completion) -> dict[str, Any]:
        """One whole text, without its index and why it ended."""

    @abstractmethod
    def opening(self, prompt: int) -> dict[str, Any] | None:
        """What a text of a stream begins with; None: with its first token."""

    @abstractmethod
    def part(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """What a delta adds to a stream, without its index and why it ended."""

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [
            {
                "index": self._index(place, completion.index),
                "finish_reason": completion.finish,
                **self.choice(place, completion),
                **self._ids(completion.tokens),
            }
            for place, result in enumerate(results)
            for completion in result.completions
        ]
        return self._head(self.KIND) | {"choices": choices, "usage": usage(results)}

    def openings(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return [
            self._chunk([{"index": self._index(place, text), "finish_reason": None, **opening}])
            for place in range(len(self.prompts))
            for text in range(self.asked.texts)
            if (opening := self.opening(place)) is not None
        ]

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        """The chunk of a delta; None: it tells nothing that was asked for (text that is held back)."""
        told = delta.text or delta.finish or delta.logprobs or (self.asked.return_token_ids and delta.tokens)
        if not told:
            return None
        choice = {
            "index": self._index(prompt, delta.index),
            "finish_reason": delta.finish,
            **self.part(prompt, delta),
            **self._ids(delta.tokens),
        }
        return self._chunk([choice])

    def last(self, results: Sequence[Result]) -> dict[str, Any] | None:
        """The chunk with the usage, where it is asked for."""
        return self._chunk([]) | {"usage": usage(results)} if self.asked.include_usage else None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"usage": None} if self.asked.include_usage else {}
        return self._head(self.CHUNK) | {"choices": choices} | more

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _index(self, prompt: int, text: int) -> int:
        return prompt * self.asked.texts + text

    def _ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self.asked.return_token_ids else {}


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Tokens of all prompts and texts of a request."""
    prompt = sum(result.usage.prompt_tokens for result in results)
    completion = sum(result.usage.completion_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
