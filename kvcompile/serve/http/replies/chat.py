"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcompile.serve.http.replies import logprobs
from kvcompile.serve.http.replies.reply import Reply
from kvcompile.serve.http.schemas.chat import ChatRequest
from kvcompile.serve.request import Completion, Delta, TokenLogprob


@dataclass
class ChatReply(Reply):
    """Messages of the assistant; a stream begins each with its role."""

    asked: ChatRequest

    ID = "chatcmpl"
    KIND = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def choice(self, prompt: int, completion: Completion) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs),
        }

    def opening(self, prompt: int) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, prompt: int, delta: Delta) -> dict[str, Any]:
        added = {"content": delta.text} if delta.text else {}
        return {"delta": added, "logprobs": self._logprobs(delta.logprobs)}

    def _logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return logprobs.of_chat(found, self.texts) if self.asked.logprobs else None
