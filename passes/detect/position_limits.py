"""Lengths: how many positions a model's own tables have, and up to which length they stay the same.

A cache keeps what was computed at an earlier, shorter length. So what the model computes must be the same for a token
in a sequence of any length. Where the graph compares the length with a constant (`max(positions) + 1 > original_max`),
the length at which that turns is derived (`passes/dependence`), and is the limit: keys of before would have to be
computed anew. Whatever else depends on the length is refused before.

A table of learned positions ends; and tables made by modules that run as Python (dynamic NTK, longrope) cannot be
derived: both are found by evaluating what is computed from positions at growing lengths, in all rows of the shorter.
Where positions are counted from the tokens, `passes/detect/counted.py` finds the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.dependence import Dependence
from kvcompile.passes.detect.counted import counted_end
from kvcompile.passes.detect.rotation import Rotations
from kvcompile.passes.graph import ancestors, expr, shape
from kvcompile.passes.probe.evaluate import shape_only
from kvcompile.passes.probe.probe import NotEvaluated, Prober
from kvcompile.passes.records import AttentionSite
from kvcompile.passes.rules import token_local

_FEW = 16  # tokens of which every table must have a row
_LENGTHS = (40, 300, 1100, 4200, 16500, 66000, 263000)
_UNKNOWN = 8192
_ENDS = "its tables of positions end there"


@dataclass(frozen=True)
class PositionLimit:
    """Up to how many tokens a model's positions hold, and what happens beyond."""

    tokens: int
    reason: str


def position_limit(
    sites: Sequence[AttentionSite],
    logits: Node,
    prober: Prober,
    made_for: int | None,
    dependence: Dependence | None = None,
) -> PositionLimit | None:
    """The limit of what is computed from positions; None where there is none up to twice the model's own length.

    dependence: of the prober's graph, with the results of all sites cut; None: made here
    """
    analysis = dependence or token_local.analysed(sites, prober)
    derived = analysis.limit([*token_local.operands(sites), logits])
    limits = []
    if derived is not None:
        tokens, where = derived
        reason = f"its positions mean something else in longer sequences: {where} turns there"
        limits.append(PositionLimit(tokens, reason))
    counted = counted_end(_needed(sites, logits), prober, _longest(prober, made_for, limits))
    if counted is not None:
        limits.append(PositionLimit(counted, _ENDS))
    sampled = _sampled(sites, logits, prober, made_for, limits)
    if sampled is not None:
        limits.append(sampled)
    return min(limits, key=lambda limit: limit.tokens, default=None)


def _sampled(
    sites: Sequence[AttentionSite],
    logits: Node,
    prober: Prober,
    made_for: int | None,
    known: Sequence[PositionLimit],
) -> PositionLimit | None:
    """The limit that shows when tables are evaluated at growing lengths; known: limits that are known already."""
    tables = _tables(sites, logits, Rotations(prober.graph_module))
    if not tables:
        return None
    few = prober.run(tables, 1, _FEW)
    known_good = [few]  # of the longest sequence so far that was the same: every row is compared with it
    longest = _longest(prober, made_for, known)

    good = _FEW

    def problem(length: int) -> str:
        """What is different at a length; empty: nothing."""
        try:
            values = prober.run(tables, 1, length)
        except NotEvaluated:
            return _ENDS
        for node, short, value in zip(tables, known_good[-1], values, strict=True):
            if not _same_start(node, short, value, prober):
                return "its positions mean something else in longer sequences (rotary tables that depend on the length)"
        known_good.append(values)
        return ""

    for length in [*(n for n in _LENGTHS if n < longest), longest]:
        reason = problem(length)
        if not reason:
            good = length
            continue
        bad = length
        while bad - good > 1:
            middle = (good + bad) // 2
            other = problem(middle)
            good, bad, reason = (good, middle, other) if other else (middle, bad, reason)
        prober.run(tables, 1, _FEW)  # tables of Python modules go back to those of short sequences
        return PositionLimit(good, reason)
    return None


def _longest(prober: Prober, made_for: int | None, known: Sequence[PositionLimit]) -> int:
    """The longest sequence that is looked at."""
    return min(2 * (made_for or _UNKNOWN) + _FEW, prober.max_seq_len, *(limit.tokens for limit in known))


def _needed(sites: Sequence[AttentionSite], logits: Node) -> set[Node]:
    """What queries, keys, values and logits are computed from."""
    operands = [node for site in sites for node in (site.q, site.k, site.v)]
    return ancestors([*operands, logits], {site.out for site in sites})


def _tables(sites: Sequence[AttentionSite], logits: Node, rotations: Rotations) -> list[Node]:
    """What is computed from positions alone and meets tokens, outside of masks."""
    needed = _needed(sites, logits)
    positional = rotations.positional()
    return [
        node
        for node in logits.graph.nodes
        if node in needed
        and node in positional
        and sum(expr(size) == rotations.seq for size in shape(node)) == 1
        and any(user in needed and user not in positional and not shape_only(user) for user in node.users)
    ]


def _same_start(node: Node, one: Tensor, other: Tensor, prober: Prober) -> bool:
    """Whether all rows that both have are the same."""
    dim = next(i for i, size in enumerate(shape(node)) if expr(size) == prober.seq)
    rows = min(one.shape[dim], other.shape[dim])
    one, other = one.narrow(dim, 0, rows), other.narrow(dim, 0, rows)
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)
