"""A rewritten model against what the original computes of the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.coverage.original import Original, error
from tests.coverage.sizes import ABOVE, TEXT, chunks

CHUNKS = [11, 1, 1, 7, 1, 1, 5]  # of the text that all recipes are given
assert sum(CHUNKS) == TEXT


def recipe_for(name: str, front: Any, tokens: int) -> tuple[Any, str]:
    """The recipe for a model, up to so many tokens; and what was changed of it."""
    from kvcompile.recipe import Recipe

    overrides: dict[str, Any] = {"compile": {"mode": "none"}}
    # Positions in the cache need a rotary embedding: elsewhere the recipe's other kind.
    fixed = [
        site.layer
        for site in front.sites
        if site.rope is None and not site.positionless and site.mask.kind != "sliding"
    ]
    note = ""
    if name == "streaming" and fixed:
        retention = {"kind": "sink_window", "sinks": 4, "window": 1020, "positions": "original"}
        layers = [
            {"where": {"attention": kind}, "cache": {"retention": {"kind": "window"}}}
            for kind in ("sliding", "chunked")
        ]
        layers += [{"where": {"index": fixed}, "cache": {"retention": retention}}]
        overrides["layers"] = layers
        note = f"streaming: original positions in {len(fixed)} of {len(front.sites)} layers"
    return Recipe.load(name, max_batch=2, max_tokens=tokens, **overrides), note


def difference(fast: Any, ids: Tensor, right: Original, long: bool, prompt: bool) -> float:
    """The largest relative RMS error of the logits over all texts.

    long:   beside the text of `TEXT` tokens, one that ends at every length that the original was run at
    prompt: and one whose prompt is longer than any size
    """
    longest = max(right.logits)
    ways = [CHUNKS] if longest >= TEXT else []
    ways += [chunks(sorted(right.logits))] if long else []
    ways += [chunks([ABOVE + 2, ABOVE + 3, longest])] if prompt and longest > ABOVE + 3 else []
    return max(_one(fast, ids, right, way) for way in ways)


def fed(fast: Any, ids: Tensor, way: Sequence[int]) -> Tensor:
    """The logits of a text that comes in chunks of these sizes."""
    fast.reset()
    return torch.cat([fast(part).logits for part in ids[:, : sum(way)].split(list(way), 1)], 1)


def _one(fast: Any, ids: Tensor, right: Original, way: Sequence[int]) -> float:
    found = fed(fast, ids, way)
    return max(error(found[:, :n], logits) for n, logits in right.logits.items() if n <= found.shape[1])
