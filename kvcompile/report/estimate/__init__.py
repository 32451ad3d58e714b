"""What a cache costs, from a config alone: bytes per token, bytes in all, and what fits in a memory budget.

Nothing is decided here: `make_plan` (kvcompile/decide) is given what the config tells of the model, and decides as for
`optimize`. What no config tells is taken to be the usual: a rotary embedding in every layer, scores that are only
scaled and masked, and MLA that has its latent form.
"""

from __future__ import annotations

from typing import Any

from kvcompile.errors import ModelError
from kvcompile.report.estimate import sizes
from kvcompile.report.estimate.planned import plan_for
from kvcompile.report.estimate.record import Estimate, Fit, LayerCost
from kvcompile.report.released import released_notes
from kvcompile.util.console import MOST_BYTES, format_bytes, parse_bytes, shown

__all__ = ["Estimate", "Fit", "LayerCost", "estimate"]

_TOKENS_UNKNOWN = 4096


def estimate(
    config_or_model: object,
    recipe: object = None,
    *,
    batch: int | None = None,
    tokens: int | None = None,
    memory: str | int | None = None,
    dtype: object = None,
    **overrides: Any,
) -> Estimate:
    """What a recipe's cache costs for a model, without its weights.

    Args:
        config_or_model: a transformers config, a dict of one, a folder with config.json (or the file), the
            name "smollm2", a model with `.config`, or an optimized module (its `.plan` is used).
        recipe: anything `Recipe.load` takes; default: baseline, or the plan of an optimized module as it is.
        batch: sequences; default 1.
        tokens: per sequence; default: the recipe's max_tokens, else the length the model was made for.
        memory: bytes for the cache alone ("24GiB", "24GB", 512): adds what fits in it.
        dtype: what `dtype: model` storage takes; default: the model's, else bfloat16.
        overrides: over the recipe, e.g. `max_tokens=4096`.

    Raises:
        ModelError: the shapes cannot be told; names the missing fields.
        PlanError, RecipeError: as `optimize` would, as far as a config tells: every layer is taken to have a rotary
            embedding.
        KVCompileError: a memory size that is none.
    """
    limit = None if memory is None else parse_bytes(memory)
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < MOST_BYTES
        ):
            raise ModelError(f"{name}: expected a whole number of at least 1, got {shown(value)}")
    asked = {"memory": limit, "batch": batch, "tokens": tokens}
    plan, shape = plan_for(config_or_model, recipe, dtype, overrides, asked)
    notes = [*plan.notes, *shape.notes]
    batch = batch or 1
    if tokens is None:
        tokens = plan.limits.max_tokens or shape.max_tokens
    if tokens is None:
        tokens = _TOKENS_UNKNOWN
        notes.append(f"neither recipe nor model says how many tokens; {tokens:,} assumed")
    if dtype is None and shape.dtype is None:
        notes.append(f"the config names no dtype; {plan.dtype} assumed")
    costs = sizes.costs(plan, shape, tokens)
    itemsize = plan.torch_dtype.itemsize
    latents = [d for d in plan.decisions if d.latent]
    expanded = sum(
        layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in shape.layers if layer.latent
    )
    if latents and expanded > sum(d.head_dim for d in latents):
        notes.append(
            "MLA is counted in its latent form: one row for all heads, the values in the keys, which optimize takes "
            f"where it proves them equal. Expanded, K and V take {format_bytes(expanded * itemsize)} a token"
        )
    readers = [cost for cost in costs if cost.shared]
    if readers:
        count = sum(len(cost.layers) for cost in readers)
        notes.append(f"{count} layers read the K/V of others and are counted with them")
    if shape.max_tokens and tokens > shape.max_tokens:
        notes.append(f"the model was made for {shape.max_tokens:,} tokens")
    notes += released_notes(plan)
    for room in sizes.pools(plan, batch, tokens):
        if room.sequences < batch:
            notes.append(
                f"a pool of {room.pages} pages ({room.placement}) holds {room.sequences:,} sequences of {tokens:,} "
                f"tokens, not {batch:,}"
            )
    total, full = sizes.total(plan, shape), sizes.total(plan, shape, full=True)
    return Estimate(
        model=shape.name,
        recipe=plan.recipe,
        dtype=plan.dtype,
        batch=batch,
        tokens=tokens,
        layers=costs,
        bytes_per_token=sum(len(cost.layers) * cost.bytes_per_token for cost in costs),
        bytes_per_token_later=sizes.slope(plan, sizes.total(plan, shape, tables=False)),
        bytes=sizes.at(total, batch, tokens),
        limit=plan.limits.max_tokens,
        limit_bytes=sizes.at(total, batch, max(tokens, plan.limits.max_tokens or 0)),
        full_bytes_per_token=sizes.slope(plan, full),
        full_bytes=sizes.at(full, batch, tokens),
        state_bytes=plan.state_bytes,
        fit=None if limit is None else sizes.fit(plan, total, limit, batch, tokens),
        notes=tuple(notes),
        devices=tuple(plan.bytes_by_device(batch, tokens).items()),
    )
