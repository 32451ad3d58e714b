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

import math
import operator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from kvcompile.compile.linear_nodes import TOGETHER, argument, fetch_before
from kvcompile.compile.norm_forms import HELD, NormNodes, is_call, norm_of
from kvcompile.passes.table import disabled, graph_pass

NAME = "norms"  # KVCOMPILE_DISABLE=norms leaves it out, to bisect, and to measure

aten, ops = torch.ops.aten, torch.ops.kvcompile


class _Sum(NamedTuple):
    """What a token is: residuals[1] + (residuals[0] + factor * layer), of one residual or two

    nodes: its own, users first; the layer is the last
    """

    layer: Node
    factor: float
    residuals: tuple[Node, ...]
    nodes: tuple[Node, ...]


@graph_pass("norms")
def join_norms(module: GraphModule) -> None:
    """Put calls in the place of norms and of the linear layers around them, where that leaves no launch between."""
    if disabled(NAME):
        return
    for node in list(module.graph.nodes):
        norm = norm_of(node)
        if norm is None or (readers := _readers(norm.between[0])) is None:
            continue
        before = _sum(norm.token)
        if before is None and norm.token.op != "placeholder":
            continue
        _join_behind(module, norm, readers)
        while before is not None:
            _join_before(module, before)
            # What it is added to may be such a sum as well, which nobody else reads.
            inner = [of for of in before.residuals if len(of.users) == 1]
            before = next((found for of in inner if (found := _sum(of)) is not None), None)


def _sum(token: Node) -> _Sum | None:
    """The linear layer that a token is made of, and what its results are added to."""
    pair = _terms(token)
    for of, residual in (pair, pair[::-1]) if pair else ():
        if (found := _layer(of)) is not None:
            layer, factor, nodes = found
            return _Sum(layer, factor, (residual,), (token, *nodes))
    for of, residual in (pair, pair[::-1]) if pair else ():
        inner = _sum(of) if len(of.users) == 1 else None
        if inner is not None and len(inner.residuals) == 1:
            return inner._replace(residuals=(*inner.residuals, residual), nodes=(token, *inner.nodes))
    return None


def _terms(token: Node) -> tuple[Node, Node] | None:
    if token.target is not aten.add.Tensor or token.kwargs or len(set(token.args)) != 2:
        return None
    first, second = token.args
    return (first, second) if isinstance(first, Node) and isinstance(second, Node) else None


def _layer(node: Node) -> tuple[Node, float, tuple[Node, ...]] | None:
    """A linear layer that nobody else reads, a number that multiplies it, and their nodes, users first."""
    if is_call(node, aten.linear.default) and _given(node):
        return node, 1.0, (node,)
    if not is_call(node, aten.mul.Tensor) or node.kwargs:
        return None
    layer, factor = node.args
    if not isinstance(layer, Node) or not isinstance(factor, float) or not math.isfinite(factor):
        return None
    if is_call(layer, aten.linear.default) and _given(layer):
        return layer, factor, (node, layer)
    return None


def _given(layer: Node) -> bool:
    """Whether a layer's weight and bias are the module's, and not computed."""
    return all(of is None or of.op in HELD for of in (argument(layer, 1), argument(layer, 2)))


class _Readers(NamedTuple):
    """Who reads a norm, of those that may be joined with it. kept: whether there are others"""

    layers: list[Node]
    alone: list[Node]
    kept: bool


# Calls of one result, and what they are behind a norm.
_ALONE: dict[Any, OpOverload] = {
    ops.linear_gated.default: ops.linear_gated_normed.default,
    ops.linear_activated.default: ops.linear_activated_normed.default,
}


def _readers(normed: Node) -> _Readers | None:
    """None: they leave a launch of the norm, or nothing is won."""
    layers = [node for node in normed.users if node.target is aten.linear.default and _reads(node, normed)]
    alone = [node for node in normed.users if node.target in _ALONE and _reads(node, normed)]
    if len(layers) > TOGETHER or not layers + alone:
        return None
    if len(layers) + len(alone) == len(normed.users):
        return _Readers(layers, alone, False)
    # Layers write it for the others, which come behind them.
    return _Readers(layers, [], True) if layers else None


def _reads(node: Node, normed: Node) -> bool:
    """Whether it is a call of layers whose x is that, and nothing else, and whose weights are the module's."""
    others = [of for of in node.all_input_nodes if of is not normed]
    return node.args[0] is normed and _count(node, normed) == 1 and all(of.op in HELD for of in others)


def _count(node: Node, of: Node) -> int:
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found.count(of)


def _join_behind(module: GraphModule, norm: NormNodes, readers: _Readers) -> None:
    graph, normed = module.graph, norm.between[0]
    layers, alone, kept = readers
    how = (norm.token, list(norm.tensors), norm.eps, norm.how, norm.dtype)
    joined = {*layers, *alone}
    first = next(node for node in graph.nodes if node in (normed.users if kept else joined))
    fetch_before(first, (*layers, *alone))
    made: list[Node] = []
    with graph.inserting_before(first):
        if layers:
            weights, biases = ([argument(node, at) for node in layers] for at in (1, 2))
            results = graph.call_function(ops.linear_normed.default, (*how, weights, biases, kept))
            places = range(len(layers) + kept)
            made = [graph.call_function(operator.getitem, (results, place)) for place in places]
        made[len(layers) : len(layers)] = [
            graph.call_function(_ALONE[node.target], (*how, *node.args[1:])) for node in alone
        ]
    for node, part in zip((*layers, *alone), made, strict=False):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    if kept:
        made[-1].meta = dict(normed.meta)
        normed.replace_all_uses_with(made[-1])
    for node in norm.between:
        graph.erase_node(node)


def _join_before(module: GraphModule, found: _Sum) -> None:
    graph, token = module.graph, found.nodes[0]
    layer = found.layer
    with graph.inserting_before(token):
        args = (layer.args[0], argument(layer, 1), argument(layer, 2), list(found.residuals), found.factor)
        made = graph.call_function(ops.linear_added.default, args)
    made.meta = dict(token.meta)
    token.replace_all_uses_with(made)
    for node in found.nodes:
        graph.erase_node(node)
