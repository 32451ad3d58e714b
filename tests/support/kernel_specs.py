"""Specs of generated kernels for tests: attention of real models, with the caches of the shipped recipes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.append import append
from kvcompile.kernels.triton.config import Config, case_of, config
from kvcompile.kernels.triton.device import Device, fp8_of
from kvcompile.kernels.triton.host.launches import Launch, launches
from kvcompile.kernels.triton.spec import KernelSpec, Role
from kvcompile.layouts import CacheLayout, InKeys, Scored, Window
from kvcompile.recipe import load_recipe, shipped_recipes
from kvcompile.recipe.retention import LayerContext
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec

TOKENS = 32768
_LAYER = 2  # of 4: the first layers may be kept as they are


@dataclass(frozen=True)
class Shape:
    """Attention of a model: heads of queries and keys, channels of keys and values, and what it does with scores."""

    heads: tuple[int, int]
    dims: tuple[int, int]
    score: ScoreSpec = ScoreSpec()
    mask: MaskSpec = MaskSpec("causal")
    latent: bool = False
    rotates: bool = False
    dtype: str = "bfloat16"

    def site(self, layout: CacheLayout) -> SiteSpec:
        if self.latent:
            layout = replace(layout, values=InKeys(self.dims[1]))
        # Layers with a window of their own have no retention by scores, and no selection: recipes give them rings, of
        # that window.
        mask, retention = self.mask, layout.retention
        if isinstance(retention, Scored) or layout.selection.selects:
            mask = MaskSpec("causal")
        elif mask.kind == "sliding" and isinstance(retention, Window):
            mask = MaskSpec("sliding", retention.size)
        rotary = None if self.latent else RotaryForm("half", 0, self.dims[0])
        return SiteSpec(layout, self.dims[0] ** -0.5, mask, self.score, rotary if self.rotates else None)

    def kernels(self, layout: CacheLayout, device: Device, tokens: int) -> tuple[Launch, ...]:
        """What is launched for `tokens` new tokens a sequence."""
        dtype = getattr(torch, self.dtype)
        return launches(self.site(layout), self.heads, self.dims, dtype, device, tokens)


SHAPES = {
    "llama": Shape((32, 8), (128, 128), rotates=True),
    "smollm2": Shape((9, 3), (64, 64), rotates=True),
    "mqa": Shape((16, 1), (128, 128)),
    "gemma": Shape((8, 4), (256, 256), ScoreSpec(softcap=50.0), MaskSpec("sliding", 4096)),
    "mla": Shape((16, 1), (576, 512), latent=True),
    "alibi": Shape((32, 32), (128, 128), ScoreSpec(bias=BiasSpec("alibi"))),
    "sinks": Shape((64, 8), (64, 64), ScoreSpec(sinks=True), MaskSpec("sliding", 128)),
}
HALF = RotaryForm("half", 0, 128)
H200 = Device("NVIDIA H200", 90, 132)
DEVICES = {
    80: Device("NVIDIA A100", 80, 108),
    86: Device("NVIDIA A10", 86, 72),
    89: Device("NVIDIA L40S", 89, 142),
    90: H200,
    100: Device("NVIDIA B200", 100, 148),
    120: Device("NVIDIA RTX PRO 6000", 120, 188),
}


def cache(**settings: Any) -> CacheLayout:
    """The layout of a recipe's `cache` section."""
    recipe = load_recipe({"name": "test", "cache": settings})
    return recipe.cache_for(0, 4, "causal")[0].build(LayerContext(tokens=TOKENS))


def recipe_layouts(name: str) -> dict[str, CacheLayout]:
    """The distinct layouts that a shipped recipe gives layers, by what the layers are."""
    recipe = load_recipe(name)
    found: dict[CacheLayout, str] = {}
    for attention, window in (("causal", None), ("sliding", 4096)):
        built = recipe.cache_for(_LAYER, 4, attention)[0].build(LayerContext(window, TOKENS, _LAYER, 4))
        found.setdefault(built, attention)
    return {attention: layout for layout, attention in found.items()}


def spec(
    role: Role, layout: CacheLayout, shape: str = "llama", *options: str, device: Device = H200, **more: Any
) -> tuple[KernelSpec, Config]:
    """The spec of a role at a site, and its configuration on a device."""
    own = SHAPES[shape]
    site = replace(own.site(layout), **{"rotary": None, **more})
    dtype = getattr(torch, own.dtype)
    used = config(case_of(role, site, *own.heads, *own.dims, dtype), site, device)
    if role == "append":
        used = replace(used, block_n=append.block_n(*own.dims, one="one" in options))
    fp8 = fp8_of(device.arch)
    made = KernelSpec(
        role,
        site,
        *own.heads,
        *own.dims,
        own.dtype,
        used.block_m,
        used.block_n,
        fp8,
        tuple(sorted(options)),
    )
    return made, used


def of_recipes() -> Iterator[tuple[str, CacheLayout]]:
    """(recipe:attention, layout) of all shipped recipes, equal layouts once."""
    seen: set[CacheLayout] = set()
    for name in shipped_recipes():
        if name == "auto":  # one of the others
            continue
        for attention, layout in recipe_layouts(name).items():
            if layout not in seen:
                seen.add(layout)
                yield f"{name}:{attention}", layout
