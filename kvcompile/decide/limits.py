"""How many tokens a sequence may have."""

from __future__ import annotations

from collections.abc import Sequence

from kvcompile.errors import PlanError
from kvcompile.layouts import Paged
from kvcompile.plan import Decision, Limits
from kvcompile.recipe import Recipe

# Tokens that a sequence may have where neither recipe nor model says how many. A cache that keeps every token has
# addresses for that many from the start, and takes memory as they come (`runtime/growing.py`).
ASSUMED = 32_768


def limits_of(
    decisions: Sequence[Decision],
    recipe: Recipe,
    model_max_tokens: int | None,
    position_limit: tuple[int, str] | None,
) -> Limits:
    """What one cache may hold: the least of what the recipe says and what the model, its biases and pools have.

    Args:
        decisions: of all sites.
        recipe: the checked recipe.
        model_max_tokens: the longest sequence the model was made for, where that is known.
        position_limit: how many positions the model has, where they end, and what happens beyond.

    Raises:
        PlanError: the recipe sets runtime.max_tokens beyond one of them, or keys before RoPE in rings need a limit that
            nobody has.
    """
    bounded = all(decision.layout.bounded for decision in decisions)
    max_tokens = recipe.runtime.max_tokens
    if max_tokens is None and not bounded:
        max_tokens = ASSUMED if model_max_tokens is None else model_max_tokens
    max_tokens = _within_reach(decisions, recipe, max_tokens)
    max_tokens = _within_pools(decisions, recipe, max_tokens)
    if position_limit is not None:
        most, reason = position_limit
        if recipe.runtime.max_tokens is not None and recipe.runtime.max_tokens > most:
            raise PlanError(
                f"recipe {recipe.name!r} sets runtime.max_tokens to {recipe.runtime.max_tokens}, but the model has "
                f"{most} positions: {reason}, and no retention lets it count further; set at most {most}"
            )
        max_tokens = most if max_tokens is None else min(max_tokens, most)
    late = [d.layer for d in decisions if d.rotary is not None and not d.layout.retention.in_cache]
    if late and max_tokens is None:
        raise PlanError(
            f"recipe {recipe.name!r} keeps keys before RoPE (cache.keys.rope: before) in layer {late[0]}, which needs "
            "a table of all positions, and no layer limits them: set runtime.max_tokens"
        )
    return Limits(recipe.runtime.max_batch, max_tokens, recipe.runtime.prefill_chunk)


def note_of(limits: Limits, recipe: Recipe, model_max_tokens: int | None) -> tuple[str, ...]:
    """What is to be told of a limit that nobody has set."""
    if recipe.runtime.max_tokens is None and model_max_tokens is None and limits.max_tokens == ASSUMED:
        return (
            f"neither the recipe nor the model says how many tokens a sequence may have: at most {ASSUMED:,}; set "
            "runtime.max_tokens for more or fewer",
        )
    return ()


def _within_reach(decisions: Sequence[Decision], recipe: Recipe, max_tokens: int | None) -> int | None:
    """The limit of tokens, at most what the layers' biases have values for."""
    limited = [(reach, d) for d in decisions if (reach := _reach(d)) is not None]
    if not limited:
        return max_tokens
    reach, first = min(limited, key=lambda pair: pair[0])
    if recipe.runtime.max_tokens is not None and recipe.runtime.max_tokens > reach:
        raise PlanError(
            f"recipe {recipe.name!r} sets runtime.max_tokens to {recipe.runtime.max_tokens}, but layer {first.layer} "
            f"({first.module_path}, {first.source}) has a {first.score.bias}, the most positions that were "
            f"evaluated: set at most {reach}, or a retention with a window"
        )
    return reach if max_tokens is None else min(max_tokens, reach)


def _within_pools(decisions: Sequence[Decision], recipe: Recipe, max_tokens: int | None) -> int | None:
    """The limit of tokens, at most what pools of a given size hold of one sequence."""
    pools = [
        (placement.pages * placement.page_size, placement, d)
        for d in decisions
        if isinstance(placement := d.layout.placement, Paged) and placement.pages and not d.layout.bounded
    ]
    if not pools:
        return max_tokens
    least, placement, first = min(pools, key=lambda pool: pool[0])
    if recipe.runtime.max_tokens is not None and recipe.runtime.max_tokens > least:
        wanted = -(-recipe.runtime.max_tokens // placement.page_size)
        raise PlanError(
            f"recipe {recipe.name!r} sets runtime.max_tokens to {recipe.runtime.max_tokens}, but the pool of layer "
            f"{first.layer} ({first.module_path}) holds {least} tokens in all ({placement}): set at most {least}, or "
            f"pages to at least {wanted}, or leave pages out and the pool grows"
        )
    return least if max_tokens is None else min(max_tokens, least)


def _reach(decision: Decision) -> int | None:
    """The longest sequence that the site's bias has values for; None: any."""
    bias, retention = decision.score.bias, decision.layout.retention
    if bias is None or bias.reach is None:
        return None
    if bias.kind == "relative":
        # The largest distance that is ever read, where that does not grow with the sequence.
        windows = [] if retention.window is None or retention.sinks else [retention.window]
        windows += [] if decision.mask.window is None else [decision.mask.window]
        if retention.in_cache:
            windows.append(int(retention.budget()))
        if windows and min(windows) <= bias.reach:
            return None
    return bias.reach
