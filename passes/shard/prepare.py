"""Prepare: a copy of a canonical graph in which fewer operators stand for the same.

    split, chunk, unbind and what is taken of them   ->   slice, select
    reshape(reshape(x))                              ->   reshape(x)

so that what is cut meets one spelling, and no dimension of rows and heads together stands between two of heads.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from kvcompile.passes.dependence.context import arguments
from kvcompile.passes.graph import call, target_name

aten = torch.ops.aten
_RESHAPE = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split")


def prepare(graph: Graph) -> dict[Node, Node]:
    """Change `graph` in place; returns what took the place of nodes that others may name."""
    moved: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            part = _part(node, node.args[0])
            if part is not None:
                node.replace_all_uses_with(part)
                moved[node] = part
                graph.erase_node(node)
        elif node.target in _RESHAPE:
            source = node.args[0]
            while isinstance(source, Node) and source.target in _RESHAPE:
                source = source.args[0]
            if source is not node.args[0]:
                node.target = aten.reshape.default
                node.args = (source, *node.args[1:])
    return moved


def _part(node: Node, source: Node) -> Node | None:
    """The slice that `source`, a split, gives at this place."""
    name, place = target_name(source), node.args[1]
    if not isinstance(place, int) or name not in (*_SPLITS, "unbind"):
        return None
    given = arguments(source)
    whole, dim = source.args[0], given.get("dim", 0)
    if not isinstance(dim, int) or not isinstance(whole, Node):
        return None
    values = source.meta["val"]
    with node.graph.inserting_before(node):
        if name == "unbind":
            return call(
                node.graph, aten.select.int, (whole, dim, place % len(values)), node, val=node.meta["val"]
            )
        place %= len(values)
        widths = [value.shape[dim] for value in values[: place + 1]]
        if not all(isinstance(width, int) for width in widths):
            return None
        stop = sum(widths)
        args = (whole, dim, stop - widths[-1], stop)
        return call(node.graph, aten.slice.Tensor, args, node, val=node.meta["val"])
