"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from kvcompile.serve.http.errors import FieldError
from kvcompile.serve.http.schemas.generation import Generation
from kvcompile.util.console import shown

_EXPECTED = "expected a text, a list of texts, a list of token ids, or a list of such lists"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _prompts(value: Any) -> list[Any]:
    """Every form that a prompt may have, as a list of texts and of lists of ids."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"{_EXPECTED}, got {shown(value)}")
    if not value:
        raise ValueError(f"{_EXPECTED}, got an empty list")
    for one in value:
        if not (isinstance(one, str) or _is_ids(one)):
            raise ValueError(f"{_EXPECTED}, got {shown(one)} in the list")
    return value


class CompletionRequest(Generation):
    """Prompts that go on."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    logprobs: int | None = None
    echo: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _best(cls, given: Any) -> Any:
        """`best_of` says nothing where it is `n`."""
        if not isinstance(given, dict) or "best_of" not in given:
            return given
        best, n = given["best_of"], given.get("n")
        if best is not None and best != (1 if n is None else n):
            raise FieldError(
                "best_of",
                "is not supported: all texts that are generated are returned",
                "unsupported_parameter",
            )
        return {name: value for name, value in given.items() if name != "best_of"}

    @model_validator(mode="after")
    def _echoes(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise FieldError(
                "echo",
                "is not supported with logprobs: prompts have no log-probabilities here",
                "unsupported_parameter",
            )
        return self
