"""Ids of what a request gives: texts, ids, or a conversation in the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcompile.serve.http.errors import Problem
from kvcompile.serve.http.schemas.chat import ChatRequest
from kvcompile.serve.http.schemas.completions import CompletionRequest
from kvcompile.serve.http.service import Service
from kvcompile.util.console import shown


@dataclass(frozen=True)
class Prompt:
    """What the engine gets, and what `echo` gives back."""

    ids: Sequence[int]
    text: str = ""


def of_completion(service: Service, asked: CompletionRequest) -> list[Prompt]:
    """All prompts of a request.

    Raises:
        Problem: 400: a text where the model has no tokenizer, or ids that are none of its vocabulary.
    """
    return [_one(service, prompt, bool(asked.echo)) for prompt in asked.prompt]


def _one(service: Service, prompt: str | list[int], echo: bool) -> Prompt:
    if isinstance(prompt, str):
        tokenizer = _tokenizer(service, "prompt")
        with service.encoding:
            ids = tokenizer(prompt)["input_ids"]
        return Prompt(_some(ids, "prompt"), prompt)
    outside = [one for one in prompt if not 0 <= one < service.engine.vocabulary]
    if outside:
        raise Problem(
            400,
            f"prompt: expected ids from 0 to {service.engine.vocabulary - 1}, got {shown(outside[0])}",
            param="prompt",
            code="invalid_value",
        )
    return Prompt(prompt, service.tokens.decode(prompt) if echo else "")


def of_chat(service: Service, asked: ChatRequest) -> list[Prompt]:
    """The one prompt of a conversation, in the model's chat template.

    Raises:
        Problem: 400: no tokenizer, no template, or one that refuses the conversation.
    """
    tokenizer = _tokenizer(service, "messages")
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise Problem(
            400,
            f"messages: the tokenizer of {service.name!r} has no chat template; use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    messages = [_message(one.model_dump(exclude_none=True), template) for one in asked.messages]
    try:
        with service.encoding:
            found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except Exception as error:
        # A template is a program of the model's: whatever it raises is about the messages.
        raise Problem(
            400,
            f"messages: the model's chat template refuses them: {type(error).__name__}: {error}"[:1000],
            param="messages",
            code="invalid_value",
        ) from None
    return [Prompt(_some(found["input_ids"], "messages"))]


def _message(message: dict[str, Any], template: Any) -> dict[str, Any]:
    """Templates that were written before the role `developer` know it as `system`."""
    if message["role"] == "developer" and "developer" not in str(template):
        return message | {"role": "system"}
    return message


def _tokenizer(service: Service, param: str) -> Any:
    if service.engine.tokenizer is None:
        raise Problem(
            400,
            f"{param}: {service.name!r} has no tokenizer: give /v1/completions a list of token ids",
            param=param,
            code="no_tokenizer",
        )
    return service.engine.tokenizer


def _some(ids: Sequence[int], param: str) -> Sequence[int]:
    if not ids:
        raise Problem(400, f"{param}: has no tokens", param=param, code="invalid_value")
    return ids
