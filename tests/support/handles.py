"""Modules without a compiler, of recipes that step back and that do not, and texts for them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from kvcompile.api import build
from kvcompile.pipeline import Front, understand
from kvcompile.recipe import Recipe

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off", "max_tokens": 96}
PAGED = {"placement": {"kind": "paged", "page_size": 16}}
INT4 = {"keys": {"dtype": "int4", "group": 32}, "values": {"dtype": "int4", "group": 32}}
KIVI = {
    "keys": {"dtype": "int4", "axis": "channel", "group": 32, "residual": 32},
    "values": {"dtype": "int4", "group": 32, "residual": 32},
}
BACK: dict[str, dict[str, Any]] = {
    "baseline": {},
    "int8": {},
    "int4": {"cache": INT4},
    "paged": {"cache": PAGED},
}
# What cannot step back, and a word of why.
ONWARD: dict[str, tuple[dict[str, Any], str]] = {
    "kivi4": ({"cache": KIVI}, "rounded"),
    "h2o": ({"cache": {"retention": {"kind": "h2o", "sinks": 0, "heavy": 8, "recent": 8}}}, "scores"),
    "streaming": ({"cache": {"retention": {"kind": "sink_window", "sinks": 2, "window": 12}}}, "given up"),
}


def text(count: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(3, 61, (batch, count), generator=torch.Generator().manual_seed(seed))


@lru_cache
def front(model: nn.Module) -> Front:
    return understand(model)


def made(model: nn.Module, recipe: str, **more: Any) -> Any:
    name = "baseline" if recipe == "paged" else recipe
    return build(model, front(model), Recipe.load(name, **{**EAGER, **more}))


def close(got: Any, wanted: Any) -> None:
    got, wanted = (x if isinstance(x, Tensor) else x.logits for x in (got, wanted))
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


class Steps:
    """How many tokens come in each pass of a module."""

    def __init__(self, fast: Any):
        self.sizes: list[int] = []
        step = fast._step

        def counting(ids: Tensor, *rest: Any) -> Any:
            self.sizes.append(ids.shape[1])
            return step(ids, *rest)

        fast._step = counting
