"""The section `auto`: a recipe that leaves the choice to the memory, the workload and how much may be lost.

Candidates are shipped recipes, in the order in which they are tried: those that lose less come first (docs/quality.md
has the figures). The first that can be planned for the model and fits into the memory is taken.

| workload | after the recipes that keep every token |
|---|---|
| chat | a budget of important tokens: questions come back to what was said |
| document | SnapKV: the question stands at the end of the prompt, and chooses what to keep |
| stream | sinks and a window: text without end, of which only the last part matters |
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from kvcompile.console import parse_bytes
from kvcompile.errors import KVCompileError
from kvcompile.recipe.retention import Strict

Workload = Literal["chat", "document", "stream"]
Loss = Literal["none", "rounding", "any"]

# What keeps all, and what rounds all.
_EXACT = ("baseline",)
_ROUNDED = ("int8", "fp8", "kivi4", "int4", "kivi2")
_FORGETS: dict[Workload, tuple[str, ...]] = {
    "chat": ("sinks_h2o_fp8", "h2o_int8", "streaming_int8"),
    "document": ("snapkv", "sinks_h2o_fp8", "h2o_int8", "streaming_int8"),
    "stream": ("streaming", "streaming_int8"),
}


class AutoConfig(Strict):
    """What a choice is made by."""

    memory: int | str | None = Field(
        None,
        description="for the cache alone, e.g. 24GiB; absent: half of what is free on the model's device",
    )
    batch: Annotated[int, Field(ge=1)] = Field(1, description="sequences that must fit")
    tokens: Annotated[int, Field(ge=1)] | None = Field(
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
                raise ValueError(str(error)) from error
        return memory

    @property
    def bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of shipped recipes, in the order in which they are tried."""
        rounded = () if self.loss == "none" else _ROUNDED
        forgets = _FORGETS[self.workload] if self.loss == "any" else ()
        if self.workload == "stream":  # without end: what keeps every token is no choice
            return forgets if self.loss == "any" else (*_EXACT, *rounded)
        return (*_EXACT, *rounded, *forgets)
