"""Collectives between the ranks of a group, as PyTorch's functional ones: Inductor traces and schedules them.

The group goes by a name. In a graph that no group runs yet it is `GROUP`; `kvcompile/parallel/` gives it a real one.
"""

from __future__ import annotations

import torch

# Importing it registers the operators.
import torch.distributed._functional_collectives as _functional  # noqa: F401
from torch.fx import Graph, GraphModule, Node

GROUP = "kvcompile.tensor"
all_reduce = torch.ops._c10d_functional.all_reduce.default
all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
wait = torch.ops._c10d_functional.wait_tensor.default


def is_collective(node: Node) -> bool:
    """Whether a node needs what other ranks have."""
    return node.target in (all_reduce, all_gather)


def add_over_ranks(graph: Graph, value: Node) -> Node:
    """The sum of a value over all ranks."""
    return graph.call_function(wait, (graph.call_function(all_reduce, (value, "sum", GROUP)),))


def gather(graph: Graph, value: Node, ranks: int) -> Node:
    """The values of all ranks, one after the other along the first dimension."""
    return graph.call_function(wait, (graph.call_function(all_gather, (value, ranks, GROUP)),))


def name_group(module: GraphModule, name: str) -> None:
    """Give the collectives of a graph the group that they run in."""
    for node in module.graph.nodes:
        if is_collective(node):
            node.args = (*node.args[:-1], name)
    module.recompile()
