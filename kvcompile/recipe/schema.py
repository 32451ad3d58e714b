"""The recipe as YAML has it, checked by pydantic; `layout_for` turns it into a CacheLayout per site.

cache:     keys, values, placement, retention   the three axes, K and V apart
layers:    [{where: ..., cache: ...}]           later entries win
runtime:   max_batch, max_tokens, prefill_chunk
compile:   mode
verify:    quick | thorough | off
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvcompile import layouts


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StorageConfig(_Strict):
    """How K or V vectors are encoded."""

    dtype: Literal["model", "int8", "int4"] = "model"
    group: Literal[0, 32, 64, 128] = Field(0, description="int4: channels per scale, 0 is the whole head")
    scale_dtype: Literal["float16", "float32"] = "float16"

    @model_validator(mode="after")
    def _group_needs_int4(self) -> StorageConfig:
        if self.group and self.dtype != "int4":
            raise ValueError(f"group is for dtype int4 only, not for {self.dtype}")
        if self.dtype == "model" and "scale_dtype" in self.model_fields_set:
            raise ValueError("scale_dtype is for quantized dtypes only, not for model")
        return self

    def build(self) -> layouts.Storage:
        match self.dtype:
            case "model":
                return layouts.ModelDtype()
            case "int8":
                return layouts.Int8(scale_dtype=self.scale_dtype)
            case "int4":
                return layouts.Int4(group=self.group, scale_dtype=self.scale_dtype)


class FullConfig(_Strict):
    kind: Literal["full"] = "full"


class WindowConfig(_Strict):
    kind: Literal["window"] = "window"
    size: Annotated[int, Field(ge=1)] | None = Field(
        None, description="tokens; the model's own window if absent"
    )


class SinkWindowConfig(_Strict):
    kind: Literal["sink_window"] = "sink_window"
    sinks: Annotated[int, Field(ge=0)] = 4
    window: Annotated[int, Field(ge=1)]
    positions: Literal["original", "in_cache"] = "original"


RetentionConfig = Annotated[FullConfig | WindowConfig | SinkWindowConfig, Field(discriminator="kind")]


class PlacementConfig(_Strict):
    kind: Literal["contiguous", "ring"]


class CacheConfig(_Strict):
    """One layer's layout. Placement defaults to what the retention frees: ring if bounded, else contiguous."""

    keys: StorageConfig = StorageConfig()
    values: StorageConfig = StorageConfig()
    placement: PlacementConfig | None = None
    retention: RetentionConfig = FullConfig()
    latent: Literal["auto", "off"] = Field(
        "auto",
        description="auto: latent attention (MLA) keeps its latent rows where that is proven equal; off: K and V",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> CacheConfig:
        problem = self.build(own_window=1).check()
        if problem:
            raise ValueError(problem)
        return self

    def build(self, own_window: int | None) -> layouts.CacheLayout:
        """The layout; `own_window` is the model's, for `retention: {kind: window}` without a size."""
        retention: layouts.Retention
        match self.retention:
            case FullConfig():
                retention = layouts.Full()
            case WindowConfig(size=size):
                window = size if size is not None else own_window
                if window is None:
                    raise ValueError("retention window has no size, and the layer has no window of its own")
                retention = layouts.Window(window)
            case SinkWindowConfig(sinks=sinks, window=window, positions=positions):
                retention = layouts.SinkWindow(sinks, window, positions)
        kind = self.placement.kind if self.placement else None
        if kind is None:
            kind = "contiguous" if isinstance(retention, layouts.Full) else "ring"
        placement = layouts.Contiguous() if kind == "contiguous" else layouts.Ring()
        return layouts.CacheLayout(self.keys.build(), self.values.build(), placement, retention)


class Where(_Strict):
    """Which layers an entry of `layers` is for: every condition given must hold."""

    index: int | list[int] | None = Field(None, description="layer numbers from 0; negative from the end")
    range: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(
        None, description="[first, last], both included"
    )
    attention: Literal["causal", "sliding", "chunked", "explicit"] | None = Field(
        None, description="the layer's own mask"
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Where:
        if self.index is None and self.range is None and self.attention is None:
            raise ValueError("name at least one of index, range, attention")
        if (
            self.range is not None
            and self.range[0] > self.range[1]
            and (self.range[0] >= 0) == (self.range[1] >= 0)
        ):
            raise ValueError(f"range {self.range} is empty: give [first, last]")
        return self

    def matches(self, layer: int, num_layers: int, attention: str) -> bool:
        if self.attention is not None and self.attention != attention:
            return False
        if self.index is not None:
            wanted = [self.index] if isinstance(self.index, int) else self.index
            if layer not in [i + num_layers if i < 0 else i for i in wanted]:
                return False
        if self.range is not None:
            first, last = (i + num_layers if i < 0 else i for i in self.range)
            return first <= layer <= last
        return True


class LayerRule(_Strict):
    where: Where
    cache: dict[str, Any] = Field(description="the axes to change; the others stay as in `cache`")


class RuntimeConfig(_Strict):
    max_batch: Annotated[int, Field(ge=1)] = 64
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="tokens per sequence; absent: what the model was made for, without limit where bounded",
    )
    prefill_chunk: Annotated[int, Field(ge=2)] = Field(512, description="tokens of a prompt in one pass")


class CompileConfig(_Strict):
    mode: Literal["default", "max-autotune", "reduce-overhead", "none"] = Field(
        "default", description="Inductor's modes; none runs the rewritten graph as it is"
    )


VerifyMode = Literal["quick", "thorough", "off"]


class Recipe(_Strict):
    """A named choice of KV cache. Read one with `Recipe.load`, which reports all problems at once."""

    name: str = "custom"
    description: str = ""
    cache: CacheConfig = CacheConfig()
    layers: tuple[LayerRule, ...] = ()
    runtime: RuntimeConfig = RuntimeConfig()
    compile: CompileConfig = CompileConfig()
    verify: VerifyMode = "quick"

    def cache_for(self, layer: int, num_layers: int, attention: str) -> tuple[CacheConfig, tuple[int, ...]]:
        """The layer's configuration, and which entries of `layers` made it (later entries win)."""
        data = self.cache.model_dump(exclude_unset=True)
        applied = []
        for number, rule in enumerate(self.layers):
            if rule.where.matches(layer, num_layers, attention):
                data = merge_cache(data, rule.cache)
                applied.append(number)
        return CacheConfig.model_validate(data), tuple(applied)

    def digest(self) -> str:
        """A short stable hash of all that the recipe says."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def load(cls, source: object, **overrides: Any) -> Recipe:
        """A shipped name, a path, a dict or a Recipe; see `kvcompile.recipe.load.load_recipe`."""
        from kvcompile.recipe.load import load_recipe

        return load_recipe(source, **overrides)


def merge_cache(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`change` over `base`, axis by axis; an axis of another kind (or dtype) replaces the whole axis.

    A retention given without a placement takes the placement back to what follows from it.
    """
    merged = dict(base)
    for axis, value in change.items():
        old = base.get(axis)
        if isinstance(value, dict) and isinstance(old, dict):
            selector = "dtype" if axis in ("keys", "values") else "kind"
            replaces = selector in value and value[selector] != old.get(selector)
            merged[axis] = dict(value) if replaces else {**old, **value}
        else:
            merged[axis] = value
    if "retention" in change and "placement" not in change:
        merged.pop("placement", None)
    return merged
