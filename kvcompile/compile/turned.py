"""Linear layers that are written as products with a weight turned round, as Falcon has them: linear layers."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from kvcompile.compile.norm_forms import HELD

aten = torch.ops.aten


def turn_products(module: GraphModule) -> None:
    """Make linear(x, W) of every matmul(x, W^T), so that it has what linear layers have.

    A weight of more dimensions, which nothing here knows, is turned round where it is multiplied (`linear_forms.py`).
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not aten.matmul.default or node.kwargs:
            continue
        x, turned = node.args
        if not isinstance(turned, Node) or x is turned or not _turned(turned):
            continue
        node.target, node.args = aten.linear.default, (x, turned.args[0])
        if not turned.users:
            graph.erase_node(turned)


def _turned(node: Node) -> bool:
    """Whether it is a weight of the module whose dimensions are in the other order."""
    weight = node.args[0] if node.args else None
    if not isinstance(weight, Node) or weight.op not in HELD or node.kwargs:
        return False
    plain = node.target in (aten.numpy_T.default, aten.t.default)
    return plain or (node.target is aten.permute.default and node.args[1] in ([1, 0], (1, 0)))
