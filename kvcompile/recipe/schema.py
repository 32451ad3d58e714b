"""The recipe as YAML has it, checked by pydantic; `layout_for` turns it into a CacheLayout per site.

cache:     keys, values, placement, retention, selection   the four axes, K and V apart
layers:    [{where: ..., cache: ...}]           later entries win
scales:    a file of calibrated scales
runtime:   max_batch, max_tokens, prefill_chunk
serve:     what an engine goes by
compile:   mode, kernels
verify:    quick | thorough | off
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from kvcompile import layouts
from kvcompile.layouts.pages import LARGEST, SMALLEST
from kvcompile.layouts.placement import placement_from
from kvcompile.recipe.auto import AutoConfig
from kvcompile.recipe.retention import (
    ANYWHERE,
    BEYOND,
    FullConfig,
    LayerContext,
    Positive,
    RetentionConfig,
    Strict,
)
from kvcompile.recipe.selection import AllTokensConfig, SelectionConfig
from kvcompile.recipe.serve import ServeConfig
from kvcompile.recipe.storage import CALIBRATED, KeysConfig, StorageConfig


class PlacementConfig(Strict):
    kind: Literal["contiguous", "ring", "slots", "paged"]
    page_size: Annotated[int, Field(ge=SMALLEST, le=LARGEST)] = Field(
        16, description="paged: tokens of a page"
    )
    pages: Positive | None = Field(
        None, description="paged: pages of each layer's pool; absent: it grows on demand"
    )
    released: bool = Field(
        False,
        description="paged, with a window: slots in the order of tokens, and pages behind the window given back",
    )

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> PlacementConfig:
        given = self.model_fields_set & {"page_size", "pages", "released"}
        if given and self.kind != "paged":
            raise ValueError(f"{' and '.join(sorted(given))}: for kind paged only, not for {self.kind}")
        return self

    def build(self) -> layouts.Placement:
        if self.kind == "paged":
            return layouts.Paged(self.page_size, self.pages, released=self.released)
        return placement_from({"kind": self.kind})


class CacheConfig(Strict):
    """One layer's layout. Placement defaults to what the retention frees: contiguous if nothing, ring or slots."""

    keys: KeysConfig = KeysConfig()
    values: StorageConfig = StorageConfig()
    placement: PlacementConfig | None = None
    retention: RetentionConfig = FullConfig()
    selection: SelectionConfig = AllTokensConfig()
    latent: Literal["auto", "off"] = Field(
        "auto",
        description="auto: latent attention (MLA) keeps its latent rows where that is proven equal; off: K and V",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> CacheConfig:
        layout = self.build(ANYWHERE)
        if layout.retention.in_cache and "rope" in self.keys.model_fields_set and self.keys.rope == "after":
            raise ValueError("positions: in_cache always keeps keys before RoPE: leave out keys.rope: after")
        problem = layout.check()
        if problem:
            raise ValueError(problem)
        return self

    def build(self, place: LayerContext) -> layouts.CacheLayout:
        """The layout of one layer.

        Raises:
            ValueError: the layer lacks what the retention is said by.
        """
        retention = self.retention.build(place)
        placement: layouts.Placement
        if self.placement is not None:
            placement = self.placement.build()
        else:
            placement = placement_from({"kind": retention.placement})
        before = self.keys.rope == "before"
        selection = self.selection.build(place)
        return layouts.CacheLayout(
            self.keys.build(), self.values.build(), placement, retention, before, selection
        )


class Where(Strict):
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
        if self.index == []:
            raise ValueError("index is empty: name a layer, or leave the entry out")
        return self

    def missing(self, num_layers: int) -> list[int]:
        """The numbers that are of no layer."""
        index = [self.index] if isinstance(self.index, int) else self.index or []
        return [i for i in (*index, *(self.range or ())) if not -num_layers <= i < num_layers]

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


class LayerRule(Strict):
    where: Where
    cache: dict[str, Any] = Field(description="the axes to change; the others stay as in `cache`")


class RuntimeConfig(Strict):
    max_batch: Positive = 64
    max_tokens: Positive | None = Field(
        None,
        description="tokens per sequence; absent: what the model was made for, without limit where bounded",
    )
    prefill_chunk: Annotated[int, Field(ge=2, lt=BEYOND)] = Field(
        512, description="tokens of a prompt in one pass"
    )


class CompileConfig(Strict):
    mode: Literal["default", "cudagraphs", "max-autotune", "none"] = Field(
        "default",
        description="Inductor's default or max-autotune; cudagraphs: a decode step is one CUDA graph, as it is under "
        "max-autotune on a GPU; none runs the rewritten graph as it is",
    )
    kernels: Literal["auto", "triton", "cpp", "reference"] = Field(
        "auto",
        description="generated kernels, in Triton or C++, or PyTorch; auto: Triton on an NVIDIA GPU, C++ on a CPU, "
        "where there are any",
    )
    backend: str = Field(
        "inductor",
        description="what compiles the graph between attention sites: inductor, or an installed backend by its name; "
        "torch_tensorrt: TensorRT engines, on NVIDIA GPUs",
    )

    @model_validator(mode="after")
    def _backend_takes_the_mode(self) -> CompileConfig:
        if self.backend != "inductor" and self.mode != "default":
            raise ValueError(
                f"backend: {self.backend} has no mode: {self.mode}: what it compiles runs outside of CUDA graphs and "
                "of Inductor's tuning; leave mode out, or use backend: inductor"
            )
        return self


VerifyMode = Literal["quick", "thorough", "off"]


class Recipe(Strict):
    """A named choice of KV cache. Read one with `Recipe.load`, which reports all problems at once."""

    name: str = "custom"
    description: str = ""
    auto: AutoConfig | None = Field(None, description="choose a shipped recipe")
    cache: CacheConfig = CacheConfig()
    layers: tuple[LayerRule, ...] = ()
    scales: str | None = Field(
        None,
        validate_default=True,
        description="the file that `kvcompile calibrate` wrote, for `scale: tensor` and `head`",
    )
    runtime: RuntimeConfig = RuntimeConfig()
    serve: ServeConfig = ServeConfig()
    compile: CompileConfig = CompileConfig()
    verify: VerifyMode = "quick"

    @field_validator("verify", mode="before")
    @classmethod
    def _off_is_a_word(cls, verify: Any) -> Any:
        """YAML reads an unquoted `off` as false."""
        return "off" if verify is False else verify

    @field_validator("scales")
    @classmethod
    def _scales_have_a_use(cls, scales: str | None, info: ValidationInfo) -> str | None:
        if not {"cache", "layers"} <= info.data.keys():
            return scales  # what is wrong there comes first
        caches = [info.data["cache"].model_dump(), *(rule.cache for rule in info.data["layers"])]
        used = any(_side(cache, side).get("scale") in CALIBRATED for cache in caches for side in _SIDES)
        if used and scales is None:
            raise ValueError(
                "is required for scale: tensor and scale: head, which must be known before the first token: name the "
                "file that `kvcompile calibrate` writes, or use scale: token"
            )
        if scales is not None and not used:
            raise ValueError(
                "is for fp8 with scale: tensor or scale: head only, and no layer has such a scale"
            )
        return scales

    @model_validator(mode="after")
    def _chooses_or_says(self) -> Recipe:
        given = sorted({"cache", "layers", "scales"} & self.model_fields_set)
        if self.auto is not None and given:
            raise ValueError(f"auto chooses a recipe: leave out {', '.join(given)}, or auto")
        return self

    def cache_for(self, layer: int, num_layers: int, attention: str) -> tuple[CacheConfig, tuple[int, ...]]:
        """The layer's configuration, and which entries of `layers` made it (later entries win).

        Raises:
            ValueError: entries that make no sense together.
        """
        data = self.cache.model_dump(exclude_unset=True)
        applied = []
        for number, rule in enumerate(self.layers):
            if rule.where.matches(layer, num_layers, attention):
                data = merge_cache(data, rule.cache)
                applied.append(number)
        try:
            return CacheConfig.model_validate(data), tuple(applied)
        except ValidationError as error:
            from kvcompile.recipe.told import problems_of

            entries = " and ".join(f"layers[{number}]" for number in applied)
            raise ValueError(f"{'; '.join(problems_of(error, ('cache',)))} (as {entries} make it)") from error

    def digest(self) -> str:
        """A short stable hash of all that the recipe says of a module, but where its scales are: a plan hashes what
        they are."""
        text = json.dumps(self.model_dump(mode="json", exclude={"scales", "serve"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def load(cls, source: object, **overrides: Any) -> Recipe:
        """A shipped name, a path, a dict or a Recipe; see `kvcompile.recipe.load.load_recipe`."""
        from kvcompile.recipe.load import load_recipe

        return load_recipe(source, **overrides)


_SIDES = ("keys", "values")


def _side(cache: dict[str, Any], side: str) -> dict[str, Any]:
    found = cache.get(side)
    return found if isinstance(found, dict) else {}


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
