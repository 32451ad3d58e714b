"""How a request's tokens are chosen, and where they end: checked when it is made, before any engine sees it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvcompile.errors import InputError

MOST_SAMPLES = 128
MOST_LOGPROBS = 20
MOST_STOPS = 16


class Structure(BaseModel):
    """A grammar that the text must follow, by xgrammar.

    kind: `json_schema` and `json` (any object) as OpenAI's response_format, `regex`, or `grammar` (EBNF)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["json", "json_schema", "regex", "grammar"]
    text: str = ""


class Sampling(BaseModel):
    """How the tokens of one request are chosen.

    The order is: penalties on the logits, temperature, top-k, top-p, min-p, then a draw from what is left. A
    temperature of 0 takes the likeliest token, after penalties.

    Source: transformers' logits processors, whose arithmetic each of these is; min-p: Nguyen et al. 2024.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1, strict=True)] = 128
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Field(ge=0, strict=True, description="0: all tokens")] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[
        float, Field(gt=0, le=100, description="above 1: tokens of prompt and text become less likely")
    ] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2, description="taken off tokens of the text")] = 0.0
    frequency_penalty: Annotated[
        float, Field(ge=-2, le=2, description="taken off tokens of the text, as often as they came")
    ] = 0.0
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63, strict=True)] | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), max_length=MOST_STOPS, description="texts that end it, and are no part of it"
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS, strict=True)] | None = Field(
        None, description="log-probabilities of each token and of so many likeliest ones, before penalties"
    )
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES, strict=True, description="texts for one prompt")] = 1
    structure: Structure | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value

    @staticmethod
    def of(**given: Any) -> Sampling:
        """A checked Sampling.

        Raises:
            InputError: all problems at once, each with its name and what came.
        """
        try:
            return Sampling(**given)
        except ValidationError as error:
            lines = [
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].lower()}, got {problem['input']!r}"
                for problem in error.errors()
            ]
            raise InputError("; ".join(lines)) from None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether what came before changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
