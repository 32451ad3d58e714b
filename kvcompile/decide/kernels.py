"""Deciding what runs a site: generated kernels, or PyTorch that Inductor compiles
(kvcompile/decide/kernel_choice.py)."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcompile.decide.kernel_choice import choose
from kvcompile.plan import Decision
from kvcompile.recipe import Recipe


def with_kernels(
    decision: Decision, recipe: Recipe, dtype: torch.dtype, device: torch.device | None
) -> Decision:
    """The decision with the kernels that run it.

    Raises:
        ValueError: the recipe asks for kernels, and the site has none.
    """
    made = choose(
        recipe.compile.kernels,
        decision.site_spec(),
        (decision.num_qo_heads, decision.num_kv_heads),
        (decision.head_dim, decision.v_head_dim),
        dtype,
        device,
        recipe.compile.mode != "none",
    )
    return replace(decision, kernels=made.kernels, kernels_because=made.because)


def same_kernels(decisions: list[Decision]) -> list[Decision]:
    """Sites that read one cache are run by the same kernels: it is theirs in all."""
    without = {d.kv_source: d for d in decisions if d.kernels == "reference"}
    return [
        replace(
            d,
            kernels="reference",
            kernels_because=f"layer {other.layer} reads the same cache: {other.kernels_because}",
        )
        if d.kernels != "reference" and (other := without.get(d.kv_source)) is not None
        else d
        for d in decisions
    ]
