"""The linear layers of a graph: those of one vector together, and what is put in their place."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

TOGETHER = 16  # MOST_LAYERS of `kernels/cpp/include/call.h`, MOST of `kernels/triton/host/linear.py`


def groups(module: GraphModule) -> list[list[Node]]:
    """The linear layers of a graph, those of one vector together; at most so many as the kernel takes."""
    found: dict[Node, list[list[Node]]] = {}
    for node in module.graph.nodes:
        if node.target is not torch.ops.aten.linear.default:
            continue
        of_x = found.setdefault(node.args[0], [[]])
        if computed(node):  # these may come late; what takes them stays where it is
            of_x.insert(0, [node])
        elif len(of_x[-1]) < TOGETHER:
            of_x[-1].append(node)
        else:
            of_x.append([node])
    return [nodes for of_x in found.values() for nodes in of_x if nodes]


def replace(module: GraphModule, nodes: Sequence[Node], target: OpOverload, args: tuple[Any, ...]) -> Node:
    """Put one call, which gives a list, in the place of `nodes`; its weights, which are no calls, come before it."""
    graph, first = module.graph, nodes[0]
    fetch_before(first, nodes)
    with graph.inserting_before(first):
        made = graph.call_function(target, args)
        parts = [graph.call_function(operator.getitem, (made, number)) for number in range(len(nodes))]
    for node, part in zip(nodes, parts, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    return made


def fetch_before(first: Node, nodes: Iterable[Node]) -> None:
    """Have the module's own tensors that `nodes` read come before `first`; those that do stay where they are."""
    for own in dict.fromkeys(own for node in nodes for own in node.all_input_nodes):
        if own.op == "get_attr" and first < own:
            first.prepend(own)


def computed(node: Node) -> bool:
    """Whether the graph computes a linear layer's weight or bias."""
    return any(of is not None and of.op == "call_function" for of in (argument(node, 1), argument(node, 2)))


def argument(node: Node, number: int) -> Node | None:
    """An argument of a linear layer: 1 its weight, 2 its bias."""
    given = (*node.args, *([node.kwargs["bias"]] if "bias" in node.kwargs else []), None)
    own = given[number]
    return own if isinstance(own, Node) else None
