"""The form of an operator: which dimensions of its operands become which of its result, and what is summed over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from kvcompile.passes.graph import expr, shape
from kvcompile.passes.shard.cuts import Placement
from kvcompile.passes.shard.ties import Tie


@dataclass(frozen=True)
class Where:
    """A call on one rank: the placements of its operands and of its result."""

    rank: int
    operands: dict[Node, Placement]
    result: Placement


Rewrite = Callable[[Where, list[Any], dict[str, Any]], None]


@dataclass(frozen=True)
class Sum:
    """Dimension `left_dim` of one operand is summed over with dimension `right_dim` of another."""

    left: Node
    left_dim: int
    right: Node
    right_dim: int


@dataclass(frozen=True)
class Form:
    """What an operator computes, as far as it matters to cuts.

    ties:    of every dimension that may be cut; an operand is whole in all others
    sum:     what is summed over, where that may be cut: the results of all ranks are then added
    bare:    target and operands of the same call without `added`, and
    added:   what is added after it
    rewrite: changes a rank's arguments (by position, and by name) where sizes or places are among them
    """

    ties: tuple[Tie, ...]
    sum: Sum | None = None
    bare: tuple[Any, tuple[Any, ...]] | None = None
    added: Node | None = None
    rewrite: Rewrite | None = None

    def ties_of(self, operand: Node) -> tuple[Tie, ...]:
        return tuple(tie for tie in self.ties if tie.operand is operand)


def sizes(node: Node) -> tuple[int | None, ...]:
    """A tensor's sizes; None: one that is not fixed."""
    return tuple(int(size) if (size := expr(dim)).is_Integer else None for dim in shape(node))


def pairs_from_right(operand: Node, result: tuple[int | None, ...]) -> list[tuple[int, int]]:
    """Dimensions of an operand that line up with a result's and are as large: broadcasting, from the right."""
    own = sizes(operand)
    shift = len(result) - len(own)
    return [
        (dim, dim + shift)
        for dim, size in enumerate(own)
        if size is not None and size == result[dim + shift] and size > 1
    ]
