"""What requests for completions and for chat have in common: how tokens are chosen and where they end.

Fields are checked for their types here, and for their values by `Sampling`, which knows the ranges.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvcompile.serve.http.errors import FieldError
from kvcompile.serve.http.schemas.structure import Pattern, ResponseFormat, structure_of
from kvcompile.serve.http.schemas.unsupported import REQUEST, without
from kvcompile.serve.sampling import Sampling

# What `Sampling` calls a field -> what a request calls it.
NAMES = {"structure": "response_format"}


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the request's usage."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Annotated[bool, Field(description="chunks are not padded")] = False

    @model_validator(mode="after")
    def _plain(self) -> StreamOptions:
        if self.include_obfuscation:
            raise FieldError(
                "include_obfuscation", "is not supported: chunks are not padded", "unsupported_parameter"
            )
        return self


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Generation(BaseModel):
    """Fields of both kinds of requests; those that OpenAI does not have are marked as extra."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, Field(description="extra; 0: all tokens")] = None
    min_p: Annotated[float | None, Field(description="extra")] = None
    repetition_penalty: Annotated[float | None, Field(description="extra")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_listed)] = None
    stop_token_ids: Annotated[list[int] | None, Field(description="extra")] = None
    ignore_eos: Annotated[bool, Field(description="extra")] = False
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_regex: Annotated[Pattern | None, Field(description="extra")] = None
    guided_grammar: Annotated[Pattern | None, Field(description="extra; EBNF")] = None
    user: Annotated[str | None, Field(description="taken, and not used")] = None
    cache_salt: Annotated[
        str | None, Field(max_length=256, description="extra; other salts share no pages with this one")
    ] = None
    return_token_ids: Annotated[bool, Field(description="extra: token_ids beside every text")] = False

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return without(given, REQUEST)

    @model_validator(mode="after")
    def _agrees(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "goes with stream: true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise FieldError("max_tokens", "is another name of max_completion_tokens: give one of them")
        structure_of(self.response_format, self.guided_regex, self.guided_grammar)
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def texts(self) -> int:
        """For each prompt."""
        return 1 if self.n is None else self.n

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    def sampling(self, max_tokens: int, logprobs: int | None) -> Sampling:
        """The engine's sampling; OpenAI's defaults where the request is silent, so its temperature is 1.

        Raises:
            pydantic.ValidationError: values out of their ranges; `NAMES` says what requests call them.
        """
        given: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "ignore_eos": self.ignore_eos,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "structure": structure_of(self.response_format, self.guided_regex, self.guided_grammar),
        }
        alike = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in (*alike, "seed", "n"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        return Sampling(**given)
