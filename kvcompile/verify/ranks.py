"""The graphs of all ranks run in step, in one process and before any group exists: what collectives give is made.

All ranks have the same nodes in the same order (`passes/shard/build.py`), so that each collective meets itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from kvcompile.errors import VerificationError
from kvcompile.passes.probe.steps import Steps
from kvcompile.passes.shard import collectives
from kvcompile.passes.shard.cuts import Cut


class InStep:
    """Runs the graphs of several ranks, node by node; `each` notes what nodes give.

    each: one for each rank
    """

    def __init__(self, each: Sequence[Steps]):
        self.each = tuple(each)
        orders = [[node for node, _ in steps.order] for steps in each]
        if any([_name(n) for n in order] != [_name(n) for n in orders[0]] for order in orders[1:]):
            raise VerificationError(
                "verification failed: the ranks' graphs are not in step: please report this model"
            )

    def run(self, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Each rank's output for values of its placeholders, in order."""
        if len(self.each) == 1:
            return [self.each[0].run(*inputs[0], after=self.after)]
        given = [iter(own) for own in inputs]
        try:
            for together in zip(*(steps.order for steps in self.each), strict=True):
                first = together[0][0]
                if first.op == "output":
                    return [
                        map_arg(node.args[0], steps.env.__getitem__)
                        for steps, (node, _) in zip(self.each, together, strict=True)
                    ]
                if first.op == "placeholder":
                    values = [next(own) for own in given]
                elif collectives.is_collective(first) or first.target is collectives.wait:
                    parts = [
                        steps.env[_used(node)] for steps, (node, _) in zip(self.each, together, strict=True)
                    ]
                    values = together_of(first, parts)
                else:
                    values = [
                        steps.run_node(node) for steps, (node, _) in zip(self.each, together, strict=True)
                    ]
                for steps, (node, done), value in zip(self.each, together, values, strict=True):
                    steps.env[node] = value
                    for used in done:
                        del steps.env[used]
                self.after(first)
            raise AssertionError("a graph has an output")
        finally:
            for steps in self.each:
                steps.env.clear()

    def after(self, node: Node) -> None:
        """Called when a node has run on all ranks; it may raise."""


def together_of(node: Node, parts: Sequence[Tensor]) -> list[Tensor]:
    """What a collective gives to each rank for what all of them give to it."""
    if node.target is collectives.all_reduce:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return [total] * len(parts)
    if node.target is collectives.all_gather:
        return [torch.cat(list(parts))] * len(parts)
    return list(parts)


def whole_of(cut: Cut | None, parts: Sequence[Tensor], dim: int) -> Tensor:
    """The whole of what is cut along one dimension; of indices that several ranks have, the first one's."""
    if cut is None:
        return parts[0]
    sizes = list(parts[0].shape)
    sizes[dim] = cut.size
    found = parts[0].new_empty(sizes)
    for rank in reversed(range(len(parts))):
        index = torch.from_numpy(cut.indices(rank)).to(found.device)
        found.index_copy_(dim, index, parts[rank])
    return found


def _used(node: Node) -> Node:
    used = node.args[0]
    assert isinstance(used, Node)
    return used


def _name(node: Node) -> str:
    return f"{node.op} {node.name if node.op == 'placeholder' else ''} {node.target if callable(node.target) else ''}"


__all__ = ["InStep", "together_of", "whole_of"]
