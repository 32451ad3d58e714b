"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcompile.serve.http.replies import logprobs
from kvcompile.serve.http.replies.reply import Reply
from kvcompile.serve.http.schemas.completions import CompletionRequest
from kvcompile.serve.request import Completion, Delta, TokenLogprob


@dataclass
class CompletionReply(Reply):
    """Texts. A stream's chunks have the form of a whole answer."""

    asked: CompletionRequest
    _offsets: dict[tuple[int, int], int] = field(default_factory=dict)

    ID = "cmpl"
    KIND = CHUNK = "text_completion"

    def choice(self, prompt: int, completion: Completion) -> dict[str, Any]:
        before = self.prompts[prompt].text if self.asked.echo else ""
        return {
            "text": before + completion.text,
            "logprobs": self._logprobs(prompt, completion.index, completion.logprobs),
        }

    def opening(self, prompt: int) -> dict[str, Any] | None:
        return {"text": self.prompts[prompt].text, "logprobs": None} if self.asked.echo else None

    def part(self, prompt: int, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text, "logprobs": self._logprobs(prompt, delta.index, delta.logprobs)}

    def _logprobs(self, prompt: int, index: int, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        written, self._offsets[prompt, index] = logprobs.of_completion(
            found, self.texts, self._offsets.get((prompt, index), 0)
        )
        return written
