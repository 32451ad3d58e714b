"""FlexAttention spelled out: the higher-order op becomes products, a softmax, and its own score and mask functions.

    out = softmax(where(mask_mod(b, h, i, j), score_mod(scale * q k^T, b, h, i, j), -inf)) v

`score_mod` and `mask_mod` were traced for one element; over index tensors that broadcast they compute all of them,
and the rules that find attention by its softmax, and probe its scores, find this one. The block tables are dead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from kvcompile.passes.graph import ancestors, call, expr, shape, target_name, value
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.table import graph_pass

aten = torch.ops.aten


@graph_pass("flex")
def spell_out(graph_module: GraphModule) -> int:
    """Rewrite every flex_attention of `graph_module` in place, where only its output is used; returns how many."""
    count = 0
    tables: list[Node] = []
    for node in list(graph_module.graph.nodes):
        if target_name(node) != "flex_attention" or node.op != "call_function":
            continue
        users = list(node.users)
        if any(user.args[1] != 0 for user in users if user.users):  # the log-sum-exp is read
            continue
        tables += [used for used in node.all_input_nodes if used not in node.args[:3]]
        with graph_module.graph.inserting_before(node):
            out = _attention(graph_module, node)
        for user in users:
            if user.args[1] == 0:
                user.replace_all_uses_with(out)
            graph_module.graph.erase_node(user)
        graph_module.graph.erase_node(node)
        count += 1
    # What made the block tables goes at once: it writes in place, within a vmap, which nothing after this can take.
    making = ancestors(tables)
    for node in reversed(graph_module.graph.nodes) if count else ():
        vmap = getattr(node.target, "__module__", "") == "torch._functorch.predispatch"
        about = target_name(node).startswith("_assert") and any(
            used in making for used in node.all_input_nodes
        )
        if not node.users and node.op == "call_function" and (vmap or about or node in making):
            graph_module.graph.erase_node(node)
    return count


def _attention(graph_module: GraphModule, node: Node) -> Node:
    graph = graph_module.graph
    q, k, v, score_mod, block_mask, scale = node.args[:6]
    score_others, mask_others = node.args[7], node.args[8]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    assert isinstance(block_mask, (list, tuple)) and isinstance(score_mod, Node)

    def made(target: Any, *args: Any, **kwargs: Any) -> Node:
        return call(graph, target, args, node, kwargs)

    group = int(expr(shape(q)[1])) // int(expr(shape(k)[1]))
    if group > 1:
        k, v = (made(aten.repeat_interleave.self_int, x, group, 1) for x in (k, v))
    # FlexAttention computes scores in float32.
    scores = made(aten.matmul.default, q, made(aten.transpose.int, k, -1, -2))
    scores = made(aten.to.dtype, scores, torch.float32)
    scores = made(aten.mul.Tensor, scores, scale)
    device = value(q).device
    index = []
    for dim, size in enumerate((shape(q)[0], shape(q)[1], shape(q)[2], shape(k)[2])):
        length: Any = int(expr(size)) if expr(size).is_Integer else _size(graph, size, made)
        place = made(aten.arange.default, length, device=device)
        index.append(made(aten.reshape.default, place, [-1] + [1] * (3 - dim)))
    scores = _inlined(graph_module, score_mod, [scores, *index, *_nodes(score_others)], node)
    mask_mod = block_mask[-1]
    assert isinstance(mask_mod, Node)
    seen = _inlined(graph_module, mask_mod, [*index, *_nodes(mask_others)], node)
    scores = made(aten.where.ScalarOther, seen, scores, float("-inf"))
    p = made(aten.softmax.int, scores, -1)
    return made(aten.matmul.default, made(aten.to.dtype, p, value(v).dtype), v)


def _size(graph: Graph, size: Any, made: Any) -> Node:
    """A size of the input itself: what makes positions must not depend on queries or keys."""
    for node in graph.nodes:
        for dim, own in enumerate(shape(node)) if node.op == "placeholder" else ():
            if expr(own) == expr(size):
                found: Node = made(aten.sym_size.int, node, dim)
                return found
    raise NotImplementedError(f"flex_attention over {size}, which is no size of the input")


def _nodes(others: Any) -> list[Any]:
    return list(others) if isinstance(others, (list, tuple)) else []


def _inlined(graph_module: GraphModule, function: Node, arguments: list[Any], like: Node) -> Node:
    """The body of a traced score or mask function, on tensors that broadcast instead of elements."""
    body: GraphModule = fetch_attr(graph_module, str(function.target))
    graph: Graph = graph_module.graph
    known: dict[Node, Any] = {}
    names = iter(arguments)
    for inner in body.graph.nodes:
        if inner.op == "placeholder":
            known[inner] = next(names)
        elif inner.op == "get_attr":
            known[inner] = fetch_attr(body, str(inner.target))
        elif inner.op == "output":
            result = inner.args[0]
            out: Node = known[result if isinstance(result, Node) else result[0]]
            return out
        elif target_name(inner) == "flat_apply":  # a captured tensor, indexed: table[h] or table[i, j]
            table, *indices = (known[used] for used in inner.args[3:])
            known[inner] = call(graph, aten.index.Tensor, (table, indices), like)
        else:
            args, kwargs = torch.fx.map_arg((inner.args, inner.kwargs), known.__getitem__)
            known[inner] = call(graph, inner.target, args, like, kwargs)
    raise AssertionError("a graph without output")
