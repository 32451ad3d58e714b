"""The section `serve`: what an engine that serves the module goes by, where its caller says nothing else.

It changes nothing in the module: the same plan, kernels and compiled code serve any of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from kvcompile.errors import KVCompileError
from kvcompile.recipe.retention import Positive, Strict
from kvcompile.util.console import parse_bytes

Switch = Literal["auto", "on", "off"]
Bytes = int | str
_SWITCHES = {True: "on", False: "off"}  # as YAML reads these words where they have no quotes


class ServeConfig(Strict):
    memory: Bytes | None = Field(
        None,
        description="of the cache, e.g. 24GiB; absent: a share of what is free, and no more than is of use",
    )
    max_sequences: Positive | None = Field(None, description="texts at a time; absent: runtime.max_batch")
    max_queue: Positive = Field(1024, description="requests that may wait")
    prefill_tokens: Positive | None = Field(
        None, description="tokens of prompts in one step; absent: runtime.prefill_chunk"
    )
    prefix_cache: Switch = Field(
        "auto", description="auto: on where the layouts allow it; on: or else refuse; off"
    )
    deterministic: bool = Field(
        False,
        description="what is found was computed in the same pieces, so that all bits are those of a cold start",
    )
    packed: Switch = Field(
        "auto",
        description="all texts of a step in one pass; auto: on GPUs, where the layouts allow it; on: or else refuse",
    )
    host_memory: Bytes = Field(
        0, description="on the host, for texts that give up their pages, and for evicted pages"
    )
    snapshot_memory: Bytes | None = Field(
        None, description="on the host, for what prefixes have in no page; absent: a quarter of the cache's"
    )
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.01, description="share of the pages that stays available when a request comes in beside others"
    )

    @field_validator("prefix_cache", "packed", mode="before")
    @classmethod
    def _is_a_word(cls, value: Any) -> Any:
        return _SWITCHES[value] if isinstance(value, bool) else value

    @field_validator("memory", "host_memory", "snapshot_memory")
    @classmethod
    def _is_a_size(cls, value: Bytes | None) -> Bytes | None:
        if value is not None:
            try:
                bytes_of(value)
            except KVCompileError as error:
                raise ValueError(str(error).removeprefix("memory: ")) from error
        return value

    @field_validator("memory")
    @classmethod
    def _is_not_nothing(cls, memory: Bytes | None) -> Bytes | None:
        if memory is not None and bytes_of(memory) == 0:
            raise ValueError("expected at least one byte, got 0")
        return memory

    def over(self, given: Mapping[str, Any]) -> ServeConfig:
        """With what a caller gave instead; None: as it is here.

        Raises:
            ValidationError: a value that no recipe could have.
        """
        changes = {name: value for name, value in given.items() if value is not None}
        return ServeConfig.model_validate(self.model_dump(exclude_unset=True) | changes)


def bytes_of(size: Bytes) -> int:
    """As `parse_bytes`, but 0 is a size.

    Raises:
        KVCompileError: no size.
    """
    return 0 if not isinstance(size, bool) and size in (0, "0") else parse_bytes(size)
