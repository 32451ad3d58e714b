"""Weights that are tensor subclasses (torchao's quantized ones) become the plain tensors that they are made of.

Export traces through what a subclass does, and names the tensors inside by an operator on the weight. They are weights
like any other: shared with the model, and never dequantized ahead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.table import graph_pass

_ACCESS = torch.ops.export.access_subclass_inner_tensor.default


@graph_pass("subclasses")
def open_subclasses(graph: Graph, attributes: dict[str, Any]) -> None:
    """Read tensors inside of weights as weights of their own; `attributes` by path gets them."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not _ACCESS:
            continue
        outer, name = node.args
        assert isinstance(outer, Node) and outer.op == "get_attr", "only weights are taken apart"
        inner = getattr(attributes[str(outer.target)], str(name))
        assert isinstance(inner, Tensor)
        path = f"{outer.target}__{name}"  # no dot: nothing lies inside of a tensor's own path
        attributes[path] = inner
        node.op, node.target, node.args = "get_attr", path, ()
