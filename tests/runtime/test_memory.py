"""Memory: what an estimate says is what the tensors take, for every recipe; and what is forgotten is freed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvcompile
from kvcompile.api import build
from kvcompile.pipeline import Front, understand
from kvcompile.recipe import Recipe, shipped_recipes
from tests.support.models import tiny_hf

EAGER = {"compile": {"mode": "none"}, "verify": "off"}
TOKENS = 192


@lru_cache
def understood(name: str) -> tuple[Any, Front]:
    model = tiny_hf(name, head_dim=32)  # whole groups of int4
    return model, understand(model)


@pytest.mark.parametrize("model", ("llama", "mistral"))
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_measured_bytes_are_the_estimate(recipe: str, model: str) -> None:
    original, front = understood(model)
    chosen = {"auto": {"memory": "64MiB"}} if recipe == "auto" else {}
    fast = build(original, front, Recipe.load(recipe, max_tokens=TOKENS, max_batch=3, **EAGER, **chosen))
    ids = torch.randint(3, 60, (3, TOKENS), generator=torch.Generator().manual_seed(0))
    fast(ids)
    cost = kvcompile.estimate(fast, batch=3, tokens=TOKENS)
    assert fast.cache.nbytes == cost.bytes == fast.plan.bytes(3)
    # From the config alone, as for a model that nobody has loaded.
    plain = kvcompile.estimate(
        original, recipe, batch=3, tokens=TOKENS, max_tokens=TOKENS, max_batch=3, **chosen
    )
    assert plain.bytes == cost.bytes


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that anything computes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(
    "retention",
    (
        {"kind": "h2o", "heavy": 12, "recent": 8, "prefill": "bounded"},
        {"kind": "tova", "budget": 24, "prefill": "bounded"},
        {"kind": "snapkv", "heavy": 16, "recent": 8, "rows": 4, "prefill": "bounded"},
        {"kind": "sink_window", "sinks": 4, "window": 20},
    ),
    ids=lambda retention: retention["kind"],
)
def test_what_is_forgotten_is_freed(retention: dict[str, Any]) -> None:
    """Ten times the text takes no byte more: no cache, no mask and no score grows with it."""
    original, front = understood("llama")
    recipe = Recipe.load({"cache": {"retention": retention}}, prefill_chunk=32, **EAGER)
    caches, peaks = set(), set()
    for tokens in (64, 640):
        fast = build(original, front, recipe)
        ids = torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(0))
        with LargestTensor() as largest, torch.no_grad():
            for start in range(0, tokens, 32):
                fast(ids[:, start : start + 32])
            for _ in range(3):
                fast(ids[:, :1])
        caches.add(fast.cache.nbytes)
        peaks.add(largest.bytes)
    assert len(caches) == 1 and len(peaks) == 1


def test_a_whole_prompt_leaves_only_the_budget() -> None:
    """prefill: full attends to all of a prompt, layer by layer; what stays is the budget."""
    original, front = understood("llama")
    recipe = Recipe.load({"cache": {"retention": {"kind": "h2o", "heavy": 12, "recent": 8}}}, **EAGER)
    fast = build(original, front, recipe)
    fast(torch.randint(3, 60, (1, 600)))
    assert fast.cache.nbytes == fast.plan.bytes(1) == kvcompile.estimate(fast, tokens=600).bytes
    assert fast.cache.nbytes < kvcompile.estimate(fast, "baseline", tokens=600).bytes / 10
