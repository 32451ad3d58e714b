"""Tiny models and small budgets for tests of artifacts: every ring wraps and every budget is met in a few tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import kvcompile
from kvcompile.pipeline import understand
from kvcompile.recipe import Recipe
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.source import Source
from kvcompile.targets.verify import source_for
from tests.support.models import tiny_hf

_SINKS_HEAVY_RECENT = {"retention": {"sinks": 4, "heavy": 8, "recent": 8}}
_KIVI = {"keys": {"residual": 32}, "values": {"residual": 32}}
_PAGES = {"selection": {"page_size": 8, "pages": 3, "dense_layers": 0}}
SMALL: dict[str, dict[str, Any]] = {
    "streaming": {"retention": {"window": 12}},
    "streaming_int8": {"retention": {"window": 12}},
    "h2o": _SINKS_HEAVY_RECENT,
    "h2o_int8": _SINKS_HEAVY_RECENT,
    "sinks_h2o_fp8": _SINKS_HEAVY_RECENT,
    "long_context": _SINKS_HEAVY_RECENT,
    "snapkv": {"retention": {"heavy": 12, "recent": 20, "rows": 8}},
    "kivi2": _KIVI,
    "kivi4": _KIVI,
    "quest": _PAGES,
    "quest_int8": _PAGES,
}
SHIPPED = (
    "baseline",
    "int8",
    "fp8",
    "int4",
    "nf4",
    "mxfp4",
    "kivi2",
    "kivi4",
    "quest",
    "quest_int8",
    "streaming",
    "streaming_int8",
    "h2o",
    "h2o_int8",
    "sinks_h2o_fp8",
    "snapkv",
    "long_context",
    "paged",
    "paged_int8",
    "chat",
)


@cache
def tiny(
    dtype: torch.dtype = torch.float32, kind: str = "llama", layers: int = 2, **changes: Any
) -> nn.Module:
    """A tiny model whose heads have 32 channels, which every shipped recipe divides; one for all who ask."""
    sizes = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    return tiny_hf(kind, attn="eager", layers=layers, **{**sizes, **changes}).to(dtype)


def small(recipe: str, **changes: Any) -> Recipe:
    """A shipped recipe with small budgets; changes: sections or keys of `runtime`."""
    cache = {"cache": SMALL[recipe]} if recipe in SMALL else {}
    return Recipe.load(recipe, **{"max_tokens": 96, "max_batch": 4, "verify": "off", **cache, **changes})


def written(model: nn.Module, folder: Path, target: Any, recipe: Recipe, **options: Any) -> Source:
    """Export, and the source that the artifact says it was made of; a model is captured once."""
    with patch("kvcompile.targets.source.understand", _understood):
        kvcompile.export(model, folder, target, recipe=recipe, options=options)
        return source_for(Manifest.read(folder), model)


_understood = cache(understand)
