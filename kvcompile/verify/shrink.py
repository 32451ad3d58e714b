"""Plans to verify by: budgets so small that a few dozen tokens exceed them, or none at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from kvcompile.decide.kernel_choice import refusal
from kvcompile.layouts import (
    CacheLayout,
    InKeys,
    Paged,
    Storage,
)
from kvcompile.plan import Decision, Plan

_SMALL_WINDOW, _SMALL_SINKS, _SMALL_HEAVY, SMALL_TOKENS = 5, 2, 3, 48
_SMALL_RESIDUAL = 4  # in two groups
_SMALL_PAGE, _SMALL_PAGES = 4, 3


def as_lossless(plan: Plan, tokens: int = SMALL_TOKENS) -> Plan:
    """The plan with layouts that forget and round nothing, for so many tokens.

    What is verified by it is the graph around attention: kernels of such a layout are not those of the plan, and would
    be compiled for nothing else.
    """
    decisions = [replace(d, layout=CacheLayout(), kernels="reference") for d in plan.decisions]
    return replace(plan, limits=replace(plan.limits, max_tokens=tokens), decisions=tuple(decisions))


def as_long(plan: Plan, tokens: int) -> Plan:
    """The plan for texts of `tokens` at most: slots that none of them fills would only cost time."""
    most = plan.limits.max_tokens
    limits = replace(plan.limits, max_tokens=None if most is None else min(most, tokens))
    return replace(plan, limits=limits)


def shrink(plan: Plan) -> Plan:
    """The plan with budgets that a few dozen tokens exceed; the arithmetic is the same."""

    def small(decision: Decision) -> Decision:
        retention = decision.layout.retention.small(_SMALL_SINKS, _SMALL_WINDOW, _SMALL_HEAVY)
        keys, values = _settling(decision.layout.keys), _settling(decision.layout.values)
        placement = decision.layout.placement
        if isinstance(placement, Paged):
            placement = Paged(_SMALL_PAGE, released=placement.released)  # several for a sequence
        selection = decision.layout.selection.small(_SMALL_PAGE, _SMALL_PAGES)
        layout = replace(
            decision.layout,
            keys=keys,
            values=values,
            placement=placement,
            retention=retention,
            selection=selection,
        )
        return _with_kernels(decision, layout, replace(layout, placement=decision.layout.placement))

    limit = plan.limits.max_tokens
    limits = replace(plan.limits, max_tokens=None if limit is None else min(limit, SMALL_TOKENS))
    return replace(plan, limits=limits, decisions=tuple(small(d) for d in plan.decisions))


def _with_kernels(decision: Decision, *smaller: CacheLayout) -> Decision:
    """The decision with the first of smaller layouts that its kernels have, or as it is: they are what is verified."""
    for layout in smaller:
        made = replace(decision, layout=layout)
        if _has_kernels(made):
            return made
    return decision


def _has_kernels(decision: Decision) -> bool:
    heads, dims = (decision.num_qo_heads, decision.num_kv_heads), (decision.head_dim, decision.v_head_dim)
    return not refusal(decision.kernels, decision.site_spec(), heads, dims, torch.float32)


_Kept = TypeVar("_Kept", bound=Storage | InKeys)


def _settling(storage: _Kept) -> _Kept:
    """The storage with so few unquantized tokens, and in a group, that some are quantized within a prompt, a step and a
    chunk."""
    if not isinstance(storage, Storage) or not storage.unquantized:
        return storage
    sinks = min(storage.sinks, _SMALL_SINKS)
    if not storage.channelwise:
        return replace(storage, residual=min(storage.residual, _SMALL_RESIDUAL), sinks=sinks)
    scale = replace(storage.scale, size=_SMALL_RESIDUAL // 2)
    return replace(storage, scale=scale, residual=_SMALL_RESIDUAL, sinks=sinks)
