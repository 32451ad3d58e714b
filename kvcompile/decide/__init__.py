"""Deciding: from the sites of a model and a checked recipe to a Plan (kvcompile/plan.py), or all that forbids it.

| file | what it decides or refuses |
|---|---|
| `site.py` | one site: the layout that the recipe gives it, and why |
| `checks.py` | what a layout asks of a site that the site cannot do |
| `scales.py` | calibrated scales: whether they are of this model, and the site's own |
| `limits.py` | how many tokens a sequence may have |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcompile.decide.kernels import same_kernels, with_kernels
from kvcompile.decide.limits import limits_of, note_of
from kvcompile.decide.scales import foreign
from kvcompile.decide.site import decide
from kvcompile.errors import PlanError
from kvcompile.passes.records import AttentionSite
from kvcompile.plan import Decision, Plan
from kvcompile.recipe import Recipe
from kvcompile.recipe.scales import ModelId, Scales
from kvcompile.specs import RecurrentState

_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def make_plan(
    sites: Sequence[AttentionSite],
    recipe: Recipe,
    dtype: torch.dtype,
    model_max_tokens: int | None,
    position_limit: tuple[int, str] | None = None,
    states: Sequence[RecurrentState] = (),
    model: ModelId | None = None,
    device: torch.device | None = None,
) -> Plan:
    """Decide a layout for every site.

    Args:
        sites: what detection found, in call order.
        recipe: the checked recipe.
        dtype: the model's dtype, which `dtype: model` storage takes.
        model_max_tokens: the longest sequence the model was made for, where that is known.
        position_limit: how many positions the model has, where they end, and what happens beyond.
        states: what recurrent modules carry; kept as it is under every recipe.
        model: whose sites they are, which calibrated scales must be of; None: unknown, only their sizes are compared.
        device: the model's, which decides on kernels; None: not known.

    Raises:
        RecipeError: the file of the recipe's scales cannot be read.
        PlanError: the recipe asks something of a site that it cannot do; all problems are listed.
    """
    scales = None if recipe.scales is None else Scales.load(recipe.scales)
    if scales is not None and (problem := foreign(scales, model, sites)):
        raise PlanError(
            f"recipe {recipe.name!r} does not fit this model:\n  - scales: {recipe.scales}: {problem}"
        )
    refused: dict[str, list[AttentionSite]] = {}
    decisions: list[Decision] = []
    for site in sites:
        try:
            decided = decide(site, sites, recipe, scales, model_max_tokens)
            decisions.append(with_kernels(decided, recipe, dtype, device))
        except ValueError as error:
            refused.setdefault(str(error), []).append(site)
    decisions = same_kernels(decisions)
    for site, reader in zip(sites, decisions if not refused else (), strict=False):
        if not reader.owns and (problem := _differs(reader, decisions[reader.kv_source])):
            refused.setdefault(problem, []).append(site)
    problems = [f"{_name(where)}: {error}" for error, where in refused.items()]
    unmatched = [
        f"layers[{i}]: no layer of this model matches `where: {rule.where.model_dump(exclude_none=True)}`"
        for i, rule in enumerate(recipe.layers)
        # An attention condition may well find nothing in a model; an index that does not exist is a slip.
        if rule.where.attention is None
        and not any(rule.where.matches(s.layer, len(sites), s.mask.kind) for s in sites)
    ]
    if dtype not in _DTYPE_NAMES:
        problems.append(f"the model's dtype is {dtype}; supported: {', '.join(_DTYPE_NAMES.values())}")
    if problems or unmatched:
        lines = "\n".join(f"  - {line}" for line in (*problems, *unmatched))
        raise PlanError(f"recipe {recipe.name!r} does not fit this model:\n{lines}")
    limits = limits_of(decisions, recipe, model_max_tokens, position_limit)
    return Plan(
        recipe.name,
        recipe.digest(),
        _DTYPE_NAMES[dtype],
        limits,
        tuple(decisions),
        tuple(states),
        None if scales is None else scales.digest(),
        notes=note_of(limits, recipe, model_max_tokens),
    )


def _differs(reader: Decision, owner: Decision) -> str | None:
    """Why a site cannot read the cache of another one, or None."""
    if reader.layout == owner.layout:
        return None
    return (
        f"cache: reads the keys and values of layer {owner.layer} ({owner.module_path}), which are kept once, as "
        f"{owner.layout}, where the recipe says {reader.layout} here; give both layers the same"
    )


def _name(sites: list[AttentionSite]) -> str:
    """The layers that one reason is for, with the first one's place in the model's code."""
    first = sites[0]
    layers = ", ".join(str(site.layer) for site in sites[:8]) + (", ..." if len(sites) > 8 else "")
    return f"layer{'s' if len(sites) > 1 else ''} {layers} ({first.module_path}, {first.source})"
