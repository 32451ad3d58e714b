"""The section `auto`: a recipe that leaves the choice to the memory, the workload and how much may be lost.

Candidates are shipped recipes, in the order in which they are tried: first those that keep every token, rounded ever
more coarsely, then those that forget. The first that can be planned for the model and fits into the memory is taken.
It is an order of what kind of loss is allowed, not of how much was measured: `kivi2` loses more than some recipes that
forget (docs/quality.md).

| workload | after the recipes that keep every token |
|---|---|
| chat | a budget of important tokens: questions come back to what was said |
| document | SnapKV: the question stands at the end of the prompt, and chooses what to keep |
| stream | sinks and a window: text without end, of which only the last part matters |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from kvcompile.errors import KVCompileError
from kvcompile.recipe.retention import Positive, Strict
from kvcompile.util.console import parse_bytes

Workload = Literal["chat", "document", "stream"]
Loss = Literal["none", "rounding", "any"]

_EXACT = ("baseline",)
# Each takes less than the one before; fp8 takes what int8 takes, and so could never be chosen.
_KEEPS_ALL = (*_EXACT, "int8", "kivi4", "int4", "kivi2")
_ANY: dict[Workload, tuple[str, ...]] = {
    "chat": (*_KEEPS_ALL, "sinks_h2o_fp8", "h2o_int8", "streaming_int8"),
    "document": (*_KEEPS_ALL, "snapkv", "sinks_h2o_fp8", "h2o_int8", "streaming_int8"),
    "stream": ("streaming", "streaming_int8"),  # without end: what keeps every token is no choice
}


class AutoConfig(Strict):
    """What a choice is made by."""

    memory: int | str | None = Field(
        None,
        description="for the cache alone, e.g. 24GiB; absent: half of what is free on the model's device",
    )
    batch: Positive = Field(1, description="sequences that must fit")
    tokens: Positive | None = Field(
        None,
        description="of each of them; absent: runtime.max_tokens, else the length the model was made for",
    )
    workload: Workload = Field("chat", description="which tokens matter once not all fit")
    loss: Loss = Field(
        "any", description="none: exact recipes only; rounding: those that keep every token; any: all"
    )

    @field_validator("memory")
    @classmethod
    def _is_a_size(cls, memory: int | str | None) -> int | str | None:
        if memory is not None:
            try:
                parse_bytes(memory)
            except KVCompileError as error:
                raise ValueError(str(error).removeprefix("memory: ")) from error
        return memory

    @property
    def bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of shipped recipes, in the order in which they are tried."""
        match self.loss:
            case "none":
                return _EXACT
            case "rounding":
                return _KEEPS_ALL
            case "any":
                return _ANY[self.workload]
