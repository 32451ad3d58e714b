"""`cache.retention` as YAML has it: which tokens stay.

| kind | keys |
|---|---|
| full | - |
| window | size |
| sink_window | sinks, window, positions |
| h2o | sinks, heavy, recent, score, pooling, granularity, rows, pyramid, prefill, positions |
| tova | budget, prefill, positions |
| snapkv | sinks, heavy, recent, rows, smooth, pooling, granularity, pyramid, prefill, positions |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvcompile import layouts


class Strict(BaseModel):
    """No unknown keys, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _no_other_number(value: Any) -> Any:
    if isinstance(value, (bool, float)):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


# Before a Literal of numbers, to which False is 0 (YAML's `no`), and 32.0 is 32.
WHOLE = BeforeValidator(_no_other_number)


@dataclass(frozen=True)
class LayerContext:
    """The layer that a retention is built for.

    own_window: the window of the model's own mask, where it has one
    tokens:     of which a fraction is a part: the most a sequence may have; None: not known
    """

    own_window: int | None = None
    tokens: int | None = None
    layer: int = 0
    num_layers: int = 1


# Any place, for what can be told of a recipe without a model.
ANYWHERE = LayerContext(own_window=1, tokens=1 << 20, layer=1 << 20)

BEYOND = 1 << 31  # kernels count tokens and slots in 32 bits
Count = Annotated[int, Field(ge=0, lt=BEYOND)]
Positive = Annotated[int, Field(ge=1, lt=BEYOND)]
Share = Count | Annotated[float, Field(gt=0, lt=1)]
Positions = Literal["original", "in_cache"]


def tokens_of(share: int | float, key: str, place: LayerContext) -> int:
    """A number of tokens, or a fraction of all.

    Raises:
        ValueError: a fraction, and nobody says of how many tokens.
    """
    if isinstance(share, int):
        return share
    if place.tokens is None:
        raise ValueError(
            f"cache.retention.{key}: {share} is a fraction of runtime.max_tokens, which neither the recipe nor the "
            "model says: set it, or give a number of tokens"
        )
    return max(1, int(share * place.tokens))


def pyramid_share(heavy: int, ratio: float, place: LayerContext) -> int:
    """A layer's part of a budget that falls evenly with depth, the first layer's `ratio` times the last's.

    The layers together have exactly as many as without (PyramidKV, Cai et al. 2024, section 4.2).
    """
    last = place.num_layers - 1
    if ratio == 1 or last < 1:
        return heavy

    def up_to(layer: int) -> int:
        """Rounded sum of the budgets of the layers before `layer`."""
        low = 2 * heavy / (1 + ratio)
        step = low * (ratio - 1) / last
        return round(layer * low * ratio - step * layer * (layer - 1) / 2)

    return up_to(place.layer + 1) - up_to(place.layer)


class FullConfig(Strict):
    kind: Literal["full"] = "full"

    def build(self, place: LayerContext) -> layouts.Retention:
        return layouts.Full()


class WindowConfig(Strict):
    kind: Literal["window"] = "window"
    size: Positive | None = Field(None, description="tokens; the model's own window if absent")

    def build(self, place: LayerContext) -> layouts.Retention:
        window = self.size if self.size is not None else place.own_window
        if window is None:
            raise ValueError("retention window has no size, and the layer has no window of its own")
        return layouts.Window(window)


class SinkWindowConfig(Strict):
    kind: Literal["sink_window"] = "sink_window"
    sinks: Count = 4
    window: Positive
    positions: Positions = "original"

    def build(self, place: LayerContext) -> layouts.Retention:
        return layouts.SinkWindow(self.sinks, self.window, self.positions)


class _ByScore(Strict):
    """What retentions by scores have in common."""

    prefill: Literal["full", "bounded"] = Field(
        "full",
        description="full: a prompt attends in one pass, and is compressed after; bounded: in chunks of "
        "runtime.prefill_chunk, each compressed before the next",
    )
    positions: Positions = "original"

    @model_validator(mode="after")
    def _counts_no_further_than_its_table(self) -> _ByScore:
        if self.positions == "in_cache" and self.prefill == "full":
            raise ValueError(
                "positions: in_cache counts up to the budget and one chunk, and prefill: full attends to a prompt of "
                "any length at once; use prefill: bounded, or positions: original"
            )
        return self


class H2OConfig(_ByScore):
    kind: Literal["h2o"] = "h2o"
    sinks: Count = 4
    heavy: Share = Field(description="tokens, or a fraction of runtime.max_tokens")
    recent: Share = Field(description="tokens, or a fraction of runtime.max_tokens")
    score: Literal["sum", "mean_age", "last"] = Field("sum", description="how probabilities add up")
    pooling: Literal["sum", "mean", "max"] = Field("mean", description="over what shares a score")
    granularity: Literal["kv_head", "layer"] = Field("kv_head", description="what has scores of its own")
    rows: Count = Field(0, description="how many of the last queries of a prompt count; 0: all")
    pyramid: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        1.0, description="how many times the last layer's heavy tokens the first layer has"
    )

    def build(self, place: LayerContext) -> layouts.Retention:
        heavy = pyramid_share(tokens_of(self.heavy, "heavy", place), self.pyramid, place)
        recent = max(1, tokens_of(self.recent, "recent", place))
        return layouts.Scored(
            self.sinks,
            heavy,
            recent,
            "h2o",
            self.score,
            self.pooling,
            self.granularity,
            self.rows,
            prefill=self.prefill,
            positions=self.positions,
        )


class TovaConfig(_ByScore):
    kind: Literal["tova"] = "tova"
    budget: Share = Field(description="tokens in all, or a fraction of runtime.max_tokens")

    def build(self, place: LayerContext) -> layouts.Retention:
        budget = tokens_of(self.budget, "budget", place)
        if budget < 2:
            raise ValueError(
                f"cache.retention.budget: expected at least 2 tokens, the newest and one other, got {budget}"
            )
        return layouts.Scored(
            0,
            budget - 1,
            1,
            "tova",
            "last",
            "mean",
            "layer",
            prefill=self.prefill,
            positions=self.positions,
        )


class SnapKVConfig(_ByScore):
    kind: Literal["snapkv"] = "snapkv"
    sinks: Count = 0
    heavy: Share = Field(description="tokens that the vote chooses, or a fraction of runtime.max_tokens")
    recent: Positive = Field(64, description="newest tokens: of the prompt, then of the text")
    rows: Positive = Field(32, description="how many of the prompt's last queries vote")
    smooth: Positive = Field(5, description="neighbours over which votes are averaged")
    pooling: Literal["sum", "mean", "max"] = "mean"
    granularity: Literal["kv_head", "layer"] = "kv_head"
    pyramid: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        1.0, description="how many times the last layer's heavy tokens the first layer has"
    )

    @model_validator(mode="after")
    def _votes_make_sense(self) -> SnapKVConfig:
        if self.smooth % 2 == 0:
            raise ValueError(
                f"smooth averages a token and as many on either side: an odd number, got {self.smooth}"
            )
        if self.rows > self.recent:
            raise ValueError(
                f"rows: the queries that vote are the newest tokens, of which recent {self.recent} stay: at most as "
                f"many, got {self.rows}"
            )
        return self

    def build(self, place: LayerContext) -> layouts.Retention:
        return layouts.Scored(
            self.sinks,
            pyramid_share(tokens_of(self.heavy, "heavy", place), self.pyramid, place),
            self.recent,
            "snapkv",
            "vote",
            self.pooling,
            self.granularity,
            self.rows,
            self.smooth,
            self.prefill,
            self.positions,
        )


RetentionConfig = Annotated[
    FullConfig | WindowConfig | SinkWindowConfig | H2OConfig | TovaConfig | SnapKVConfig,
    Field(discriminator="kind"),
]
KINDS = ("full", "window", "sink_window", "h2o", "tova", "snapkv")
