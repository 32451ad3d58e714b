"""Deciding: from what is known of a model and a checked recipe to a Plan (kvcompile/plan.py), or all that forbids it.

`make_plan` is the only function that decides. `optimize`, `explain`, `export` and `estimate` all call it; they differ
in how they come to know the model (`known.py`): from its graph, or from its config.

| file | what it decides or refuses |
|---|---|
| `auto.py` | which recipe, where the recipe says `auto` |
| `site.py` | one site: the layout that the recipe gives it, and why |
| `checks.py` | what a layout asks of a site that the site cannot do |
| `scales.py` | calibrated scales: whether they are of this model, and the site's own |
| `kernels.py`, `kernel_choice.py` | what runs a site: generated kernels, or the reference |
| `limits.py` | how many tokens a sequence may have |
| `rope_on_append.py` | whether the op rotates new queries and keys |
| `decode_step.py` | whether a decode step is one CUDA graph |
| `backend.py` | what compiles the graph |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcompile.decide.auto import choose, free_for_caches
from kvcompile.decide.backend import with_backend
from kvcompile.decide.decode_step import with_step
from kvcompile.decide.kernels import same_kernels, with_kernels
from kvcompile.decide.known import KnownModel, KnownSite
from kvcompile.decide.limits import limits_of, note_of
from kvcompile.decide.rope_on_append import rope_on_append
from kvcompile.decide.scales import foreign
from kvcompile.decide.site import decide_site
from kvcompile.errors import PlanError
from kvcompile.plan import Decision, Plan
from kvcompile.recipe import Recipe
from kvcompile.recipe.scales import Scales

_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def make_plan(model: KnownModel, recipe: Recipe) -> Plan:
    """Decide everything: a layout for every site, what runs it, the limits, and how a step runs.

    Raises:
        RecipeError: the file of the recipe's scales cannot be read.
        PlanError: the recipe asks something of a site that it cannot do, all problems are listed; or nothing that
            `auto` may choose fits.
    """
    if recipe.auto is not None:
        free = free_for_caches(model)
        return choose(recipe, lambda chosen: make_plan(model, chosen), model.max_tokens, free)
    plan = rope_on_append(_with_layouts(model, recipe))
    plan = with_step(plan, recipe.compile.mode, model.device, model.python)
    return with_backend(plan, recipe.compile.backend, model.device)


def _with_layouts(model: KnownModel, recipe: Recipe) -> Plan:
    """The plan with a layout, kernels and limits."""
    sites = model.sites
    scales = None if recipe.scales is None else Scales.load(recipe.scales)
    if scales is not None and (problem := foreign(scales, model.identity, sites)):
        raise PlanError(
            f"recipe {recipe.name!r} does not fit this model:\n  - scales: {recipe.scales}: {problem}"
        )
    refused: dict[str, list[KnownSite]] = {}
    decisions: list[Decision] = []
    for site in sites:
        try:
            decided = decide_site(site, sites, recipe, scales, model.max_tokens)
            decisions.append(with_kernels(decided, recipe, model.dtype, site.device or model.device))
        except ValueError as error:
            refused.setdefault(str(error), []).append(site)
    decisions = same_kernels(decisions)
    for site, reader in zip(sites, decisions if not refused else (), strict=False):
        if not reader.owns and (problem := _differs(reader, decisions[reader.kv_source])):
            refused.setdefault(problem, []).append(site)
    problems = [f"{_name(where)}: {error}" for error, where in refused.items()]
    unmatched = _unmatched(recipe, sites)
    if model.dtype not in _DTYPE_NAMES:
        problems.append(f"the model's dtype is {model.dtype}; supported: {', '.join(_DTYPE_NAMES.values())}")
    if problems or unmatched:
        lines = "\n".join(f"  - {line}" for line in (*problems, *unmatched))
        raise PlanError(f"recipe {recipe.name!r} does not fit this model:\n{lines}")
    limits = limits_of(decisions, recipe, model.max_tokens, model.position_limit)
    return Plan(
        recipe.name,
        recipe.digest(),
        _DTYPE_NAMES[model.dtype],
        limits,
        tuple(decisions),
        model.states,
        None if scales is None else scales.digest(),
        notes=note_of(limits, recipe, model.max_tokens),
    )


def _unmatched(recipe: Recipe, sites: Sequence[KnownSite]) -> list[str]:
    """Which entries of `layers` name layers that are not there: a slip, also where others are found."""
    lines = []
    for number, rule in enumerate(recipe.layers):
        where = rule.where
        missing = where.missing(len(sites))
        if missing:
            lines.append(
                f"layers[{number}].where: this model has no layer {', '.join(map(str, missing))}: its attention layers "
                f"are 0 to {len(sites) - 1}, or -1 to -{len(sites)} from the end"
            )
        # An attention condition may well find nothing in a model.
        elif where.attention is None and not any(
            where.matches(site.layer, len(sites), site.mask.kind) for site in sites
        ):
            lines.append(
                f"layers[{number}]: no layer of this model matches `where: {where.model_dump(exclude_none=True)}`"
            )
    return lines


def _differs(reader: Decision, owner: Decision) -> str | None:
    """Why a site cannot read the cache of another one, or None."""
    if reader.layout == owner.layout:
        return None
    return (
        f"cache: reads the keys and values of layer {owner.layer} ({owner.module_path}), which are kept once, as "
        f"{owner.layout}, where the recipe says {reader.layout} here; give both layers the same"
    )


def _name(sites: Sequence[KnownSite]) -> str:
    """The layers that one reason is for, with the first one's place in the model's code."""
    first = sites[0]
    layers = ", ".join(str(site.layer) for site in sites[:8]) + (", ..." if len(sites) > 8 else "")
    return f"layer{'s' if len(sites) > 1 else ''} {layers} ({first.module_path}, {first.source})"
