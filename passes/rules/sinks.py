"""Rule `sinks`: the weight that holds the sink logits that were measured (one per query head)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.graph import ancestors, call, shape
from kvcompile.passes.probe.probe import Prober

aten = torch.ops.aten


def sink_node(logits: Tensor, out: Node, stop: set[Node], prober: Prober) -> Node:
    """The weight that holds these logits [H], as a node [H]; where none does, a constant."""
    region = ancestors([out], stop)
    constant: set[Node] = set()
    candidates: list[Node] = []
    for node in out.graph.nodes:
        if node not in region or node in stop:
            continue
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (
            node.op == "call_function" and inputs and all(n in constant for n in inputs)
        ):
            constant.add(node)
            candidates += [node] if shape(node) else []
    for node in candidates:
        if node.meta["val"].numel() != len(logits) or not node.meta["val"].is_floating_point():
            continue
        value: Tensor = prober.run([node], 1, 29)[0].detach()
        if torch.allclose(value.double().reshape(-1), logits, rtol=1e-5, atol=1e-5):
            if value.dim() == 1:
                return node
            with node.graph.inserting_after(node):
                return call(node.graph, aten.reshape.default, (node, [-1]), node)
    return prober.constant("sinks", logits.float(), out)
