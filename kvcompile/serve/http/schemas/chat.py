"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvcompile.serve.http.errors import FieldError
from kvcompile.serve.http.schemas.generation import Generation
from kvcompile.serve.http.schemas.unsupported import MESSAGE, without
from kvcompile.util.console import shown


def _text(value: Any) -> Any:
    """A text, or parts that are all texts, joined by line ends."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(f"expected a text or a list of parts with a type, got {shown(part)} in the list")
        if part["type"] != "text":
            raise ValueError(
                f"parts of type {shown(part['type'])} are not supported: texts are all that there is"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"expected a part with type and text, got {shown(part)}")
        texts.append(part["text"])
    return "\n".join(texts)


def _role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise ValueError(f"messages of the role {value!r} are not supported: no tools are offered")
    return value


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return without(given, MESSAGE)


class ChatRequest(Generation):
    """A conversation that the model answers."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _likeliest(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "goes with logprobs: true")
        return self

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told of each; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
