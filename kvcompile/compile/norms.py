"""RMSNorm between linear layers: part of those behind it, where a residual is part of the layer before it.

    h = add(r, linear(x))                                         what an attention block or an MLP adds
    y = mul(w, to(mul(to(h), rsqrt(add(mean(pow(to(h), 2)), eps)))))
    linear(y, ..), ..                                      all that read y: queries, keys, values; a gate

A kernel that multiplies one token can do both ends (`kernels/triton/linear/linear.py`): it adds `r` to what it stores,
and norms what it reads, which every program does for itself while weights come. So no launch stands between two layers.
That is for graphs of one token of one sequence: of more, the norm is the work of a kernel of its own.

Only both at once are worth it. A norm whose token somebody else makes (an embedding, another norm) is a part of what
makes it, which Inductor compiles into one kernel.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from kvcompile.compile.linear_nodes import TOGETHER, argument, fetch_before
from kvcompile.passes.table import disabled, graph_pass

NAME = "norms"  # KVCOMPILE_DISABLE=norms leaves it out, to bisect, and to measure

aten = torch.ops.aten
_HELD = ("placeholder", "get_attr")


class _Norm(NamedTuple):
    """A norm. token: h; weight: w; between: its nodes, users first, of which the first is y

    dtype: what the product of both is rounded to, by name, where it is computed in float32; "": neither
    """

    token: Node
    weight: Node
    eps: float
    dtype: str
    between: tuple[Node, ...]


@graph_pass("norms")
def join_norms(module: GraphModule) -> None:
    """Put calls in the place of norms and of the linear layers around them, where that leaves no launch between."""
    if disabled(NAME):
        return
    for node in list(module.graph.nodes):
        norm = _found(node)
        if norm is None or (before := _adds(norm.token)) is None or not _all_read(norm.between[0]):
            continue
        _join_behind(module, norm)
        _join_before(module, norm.token, *before)


def _found(root: Node) -> _Norm | None:
    """The norm whose root of a mean this is."""
    shifted = _argument(root, aten.rsqrt.default, aten.add.Tensor)
    mean = _argument(shifted, aten.add.Tensor, aten.mean.dim)
    power = _argument(mean, aten.mean.dim, aten.pow.Tensor_Scalar)
    if shifted is None or mean is None or power is None:
        return None
    eps, own, scaled = shifted.args[1], power.args[0], next(iter(root.users))
    plain = tuple(mean.args[1:]) == ([-1], True) and power.args[1] == 2
    if not plain or not _is(scaled, aten.mul.Tensor) or set(scaled.args) != {own, root}:
        return None
    if not isinstance(eps, float) or not isinstance(own, Node):
        return None
    between: tuple[Node, ...] = (scaled, root, shifted, mean, power)
    token: Any = own
    dtype = ""
    made = next(iter(scaled.users))
    if made.target is aten.to.dtype:  # computed in float32, and rounded
        wide = own.target is aten.to.dtype and own.args[1] is torch.float32
        if not wide or len(own.users) != 2 or not _is(made, aten.to.dtype) or made.kwargs or own.kwargs:
            return None
        dtype, token = str(made.args[1]).removeprefix("torch."), own.args[0]
        between, made = (made, *between, own), next(iter(made.users))
    pair = [given for given in made.args if given is not between[0]]
    multiplied = made.target is aten.mul.Tensor and not made.kwargs and len(made.args) - len(pair) == 1
    weight = pair[0] if multiplied else None
    if not isinstance(weight, Node) or weight.op not in _HELD or not isinstance(token, Node):
        return None
    return _Norm(token, weight, eps, dtype, (made, *between))


def _argument(node: Node | None, target: Any, of: Any) -> Node | None:
    """The first argument of a call of `target` that nobody else reads, if it is a call of `of` that it alone reads."""
    given = node.args[0] if node is not None and _is(node, target) and not node.kwargs else None
    return given if isinstance(given, Node) and _is(given, of) else None


def _is(node: Any, target: Any) -> bool:
    """Whether it is a call of that which nobody else reads."""
    return isinstance(node, Node) and node.target is target and len(node.users) == 1


def _adds(token: Node) -> tuple[Node, Node] | None:
    """The linear layer that a token is made of, and what its results are added to."""
    if token.target is not aten.add.Tensor or token.kwargs or len(set(token.args)) != 2:
        return None
    first, second = token.args
    if not isinstance(first, Node) or not isinstance(second, Node):
        return None
    for layer, residual in ((first, second), (second, first)):
        if _is(layer, aten.linear.default) and _given(layer):
            return layer, residual
    return None


def _given(layer: Node) -> bool:
    """Whether a layer's weight and bias are the module's, and not computed."""
    return all(of is None or of.op in _HELD for of in (argument(layer, 1), argument(layer, 2)))


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
    held = all(node.op in _HELD for gate in gates for node in gate.all_input_nodes[1:])
    return readers and first and held and all(map(_given, layers))


def _join_behind(module: GraphModule, norm: _Norm) -> None:
    graph, normed = module.graph, norm.between[0]
    layers, gates = _layers(normed)
    how = (norm.token, norm.weight, norm.eps, norm.dtype)
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
