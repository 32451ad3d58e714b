"""Norms between linear layers: part of those behind them, where a residual is part of the layer before them.

    h = add(r, linear(x))          what an attention block or an MLP adds
    y = norm(h)                    RMSNorm or LayerNorm, in any of the forms of `norm_forms.py`
    linear(y, ..), ..              all that read y: queries, keys, values; a gate

A kernel that multiplies one token can do both ends (`kernels/triton/linear/linear.py`): it adds `r` to what it stores,
and norms what it reads, which every program does for itself while weights come. So no launch stands between two layers.
That is for graphs of one token of one sequence: of more, the norm is the work of a kernel of its own.

Only both at once are worth it. A norm whose token somebody else makes (an embedding, another norm) is a part of what
makes it, which Inductor compiles into one kernel; but not where another region has made it, which attention stands
behind: there the norm would be a launch by itself.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from kvcompile.compile.linear_nodes import TOGETHER, argument, fetch_before
from kvcompile.compile.norm_forms import HELD, NormNodes, is_call, norm_of
from kvcompile.passes.table import disabled, graph_pass

NAME = "norms"  # KVCOMPILE_DISABLE=norms leaves it out, to bisect, and to measure

aten = torch.ops.aten


@graph_pass("norms")
def join_norms(module: GraphModule) -> None:
    """Put calls in the place of norms and of the linear layers around them, where that leaves no launch between."""
    if disabled(NAME):
        return
    for node in list(module.graph.nodes):
        norm = norm_of(node)
        if norm is None or not _all_read(norm.between[0]):
            continue
        before = _adds(norm.token)
        if before is None and norm.token.op != "placeholder":
            continue
        _join_behind(module, norm)
        if before is not None:
            _join_before(module, norm.token, *before)


def _adds(token: Node) -> tuple[Node, Node] | None:
    """The linear layer that a token is made of, and what its results are added to."""
    if token.target is not aten.add.Tensor or token.kwargs or len(set(token.args)) != 2:
        return None
    first, second = token.args
    if not isinstance(first, Node) or not isinstance(second, Node):
        return None
    for layer, residual in ((first, second), (second, first)):
        if is_call(layer, aten.linear.default) and _given(layer):
            return layer, residual
    return None


def _given(layer: Node) -> bool:
    """Whether a layer's weight and bias are the module's, and not computed."""
    return all(of is None or of.op in HELD for of in (argument(layer, 1), argument(layer, 2)))


def _layers(normed: Node) -> tuple[list[Node], list[Node]]:
    """The linear layers behind a norm, and the gates."""
    users = list(normed.users)
    return (
        [node for node in users if node.target is aten.linear.default],
        [node for node in users if node.target is torch.ops.kvcompile.linear_gated.default],
    )


def _all_read(normed: Node) -> bool:
    """Whether all that reads it are layers of it, whose weights are the module's."""
    layers, gates = _layers(normed)
    readers = len(layers) + len(gates) == len(normed.users) and len(layers) <= TOGETHER
    first = all(node.args[0] is normed and normed not in node.args[1:] for node in (*layers, *gates))
    held = all(node.op in HELD for gate in gates for node in gate.all_input_nodes[1:])
    return readers and first and held and all(map(_given, layers))


def _join_behind(module: GraphModule, norm: NormNodes) -> None:
    graph, normed = module.graph, norm.between[0]
    layers, gates = _layers(normed)
    how = (norm.token, list(norm.tensors), norm.eps, norm.how, norm.dtype)
    readers = {*layers, *gates}
    first = next(node for node in graph.nodes if node in readers)
    fetch_before(first, (*layers, *gates))
    with graph.inserting_before(first):
        if layers:
            weights, biases = ([argument(node, at) for node in layers] for at in (1, 2))
            made = graph.call_function(torch.ops.kvcompile.linear_normed.default, (*how, weights, biases))
            parts = [graph.call_function(operator.getitem, (made, number)) for number in range(len(layers))]
        joined = [
            graph.call_function(torch.ops.kvcompile.linear_gated_normed.default, (*how, *gate.args[1:]))
            for gate in gates
        ]
    for node, part in (*zip(layers, parts if layers else (), strict=True), *zip(gates, joined, strict=True)):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    for node in norm.between:
        graph.erase_node(node)


def _join_before(module: GraphModule, token: Node, layer: Node, residual: Node) -> None:
    graph = module.graph
    with graph.inserting_before(token):
        args = (layer.args[0], argument(layer, 1), argument(layer, 2), residual)
        made = graph.call_function(torch.ops.kvcompile.linear_added.default, args)
    made.meta = dict(token.meta)
    token.replace_all_uses_with(made)
    graph.erase_node(token)
    graph.erase_node(layer)
