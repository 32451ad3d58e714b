"""Lengths: how many positions a model's own tables have, and up to which length they stay the same.

A cache keeps what was computed at an earlier, shorter length. So what the model computes from positions alone (cosines
and sines, learned embeddings) must be the same for a token in a sequence of any length. Dynamic NTK and longrope scale
their tables by the length: beyond the length at which that begins, keys of before would have to be rotated anew. And
a table of learned positions ends. Both are found by evaluating the tables at growing lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.base import ancestors, expr, shape
from kvcompile.passes.evaluate import shape_only
from kvcompile.passes.probe import NotEvaluated, Prober
from kvcompile.passes.rotation import Rotations
from kvcompile.types import AttentionSite

_FEW = 16  # tokens of which every table must have a row
_LENGTHS = (40, 300, 1100, 4200, 16500, 66000, 263000)
_UNKNOWN = 8192


@dataclass(frozen=True)
class PositionLimit:
    """Up to how many tokens a model's positions hold, and what happens beyond."""

    tokens: int
    reason: str


def position_limit(
    sites: Sequence[AttentionSite], logits: Node, prober: Prober, made_for: int | None
) -> PositionLimit | None:
    """The limit of what is computed from positions; None where there is none up to twice the model's own length."""
    tables = _tables(sites, logits, Rotations(prober.graph_module))
    if not tables:
        return None
    few = prober.run(tables, 1, _FEW)
    longest = min(2 * (made_for or _UNKNOWN) + _FEW, prober.max_seq_len)

    def problem(length: int) -> str:
        """What is different at a length; empty: nothing."""
        try:
            values = prober.run(tables, 1, length)
        except NotEvaluated:
            return "its tables of positions end there"
        for node, short, value in zip(tables, few, values, strict=True):
            if not _same_start(node, short, value, prober):
                return "its positions mean something else in longer sequences (rotary tables that depend on the length)"
        return ""

    good = _FEW
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


def _tables(sites: Sequence[AttentionSite], logits: Node, rotations: Rotations) -> list[Node]:
    """What is computed from positions alone and meets tokens, outside of masks."""
    operands = [node for site in sites for node in (site.q, site.k, site.v)]
    needed = ancestors([*operands, logits], {site.out for site in sites})
    positional = rotations.positional()
    return [
        node
        for node in logits.graph.nodes
        if node in needed
        and node in positional
        and sum(expr(size) == rotations.seq for size in shape(node)) == 1
        and any(user in needed and user not in positional and not shape_only(user) for user in node.users)
    ]


def _same_start(node: Node, short: Tensor, value: Tensor, prober: Prober) -> bool:
    dim = next(i for i, size in enumerate(shape(node)) if expr(size) == prober.seq)
    start = value.narrow(dim, 0, _FEW)
    if not (start.is_floating_point() or start.is_complex()):
        return torch.equal(start, short)
    return torch.allclose(start, short, rtol=1e-5, atol=1e-6)
