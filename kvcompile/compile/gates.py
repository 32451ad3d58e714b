"""Gates of MLPs: two linear layers of one vector, of which the first, through its activation, opens the second.

    mul(act(linear(x, G)), linear(x, U))          and, of one weight that holds both, with chunk between
    act(linear(x, W))                             which opens nothing: an MLP without a gate

A kernel that has a row of both gives the product at once (`kernels/triton/linear/linear.py`), so that neither half goes
to memory and no launch comes behind. Whether it does is decided when the graph is traced; else it is spelled out again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from kvcompile.compile.linear_nodes import argument, computed

aten = torch.ops.aten


def _gelu(node: Node) -> str | None:
    how = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(how))


_ACTIVATIONS: dict[Any, Callable[[Node], str | None]] = {
    aten.silu.default: lambda node: "silu",
    aten.gelu.default: _gelu,
    aten.relu.default: lambda node: "relu",
}


class _Gate(NamedTuple):
    """What is joined: layers, of which the first is the gate, or one that holds both; nodes between, users first."""

    layers: tuple[Node, ...]
    activation: str
    between: tuple[Node, ...]
    second: bool = False  # of one layer: whether its second half is the gate


def join_gates(module: GraphModule, made: bool = True) -> None:
    """Put one call in the place of every gate and what it opens, where nobody else reads what lies between.

    made: of weights that the graph computes as well
    """
    graph = module.graph
    for product in list(graph.nodes):
        found = _found(product)
        if found is None or (not made and any(map(computed, found.layers))):
            continue
        weights, biases = ([argument(node, at) for node in found.layers] for at in (1, 2))
        args = (found.layers[0].args[0], weights, biases, found.activation, found.second)
        with graph.inserting_before(product):
            joined = graph.call_function(torch.ops.kvcompile.linear_gated.default, args)
        joined.meta = dict(product.meta)
        product.replace_all_uses_with(joined)
        for node in (product, *found.between, *found.layers):
            graph.erase_node(node)


def join_activations(module: GraphModule, made: bool = True) -> None:
    """Put one call in the place of every layer and its activation, where nobody else reads the layer; after gates.

    Layers of one vector stay together: their launch is worth more.
    """
    graph = module.graph
    for act in list(graph.nodes):
        layer = act.args[0] if act.op == "call_function" and act.target in _ACTIVATIONS else None
        if not isinstance(layer, Node) or not _linear(layer) or len(layer.users) != 1:
            continue
        activation, x = _ACTIVATIONS[act.target](act), layer.args[0]
        alone = isinstance(x, Node) and sum(map(_linear, x.users)) == 1
        if activation is None or not alone or (not made and computed(layer)):
            continue
        args = (x, argument(layer, 1), argument(layer, 2), activation)
        with graph.inserting_before(act):
            joined = graph.call_function(torch.ops.kvcompile.linear_activated.default, args)
        joined.meta = dict(act.meta)
        act.replace_all_uses_with(joined)
        graph.erase_node(act)
        graph.erase_node(layer)


def _found(product: Node) -> _Gate | None:
    if product.target is not aten.mul.Tensor or product.kwargs or len(set(product.args)) != 2:
        return None
    for act, up in (product.args, reversed(product.args)):
        gate = act.args[0] if isinstance(act, Node) and act.target in _ACTIVATIONS else None
        if not (isinstance(act, Node) and isinstance(up, Node) and isinstance(gate, Node)):
            continue
        activation = _ACTIVATIONS[act.target](act)
        if activation is None or not all(len(node.users) == 1 for node in (act, gate, up)):
            continue
        if _linear(gate) and _linear(up) and gate.args[0] is up.args[0] and _alike(gate, up):
            return _Gate((gate, up), activation, (act,))
        if (halves := _halves(gate, up)) is not None:
            whole, cut = halves
            return _Gate((whole,), activation, (act, gate, up, cut), bool(gate.args[1] == 1))
    return None


def _linear(node: Node) -> bool:
    return node.target is aten.linear.default


def _alike(gate: Node, up: Node) -> bool:
    """Whether both have a bias, or neither."""
    return (argument(gate, 2) is None) == (argument(up, 2) is None)


def _halves(gate: Node, up: Node) -> tuple[Node, Node] | None:
    """A layer, and the node that cuts its results in two, if these are its parts."""
    if not (gate.target is up.target is operator.getitem and gate.args[0] is up.args[0]):
        return None
    cut = gate.args[0]
    whole = cut.args[0] if isinstance(cut, Node) and cut.target is aten.chunk.default else None
    if not (isinstance(cut, Node) and isinstance(whole, Node)) or tuple(cut.args[1:]) != (2, -1):
        return None
    parts = len(cut.users) == 2 and {gate.args[1], up.args[1]} == {0, 1}
    return (whole, cut) if parts and _linear(whole) and len(whole.users) == 1 else None
