"""Differences of probabilities, as products of each: differential attention (Ye et al. 2024).

    (softmax(s1) - c softmax(s2)) v          =  softmax(s1) v - c (softmax(s2) v),   c the same for all keys
    x[.., i, :, :] v   (of x [.., n, S, S])  =  (x v')[.., i, :, :],   v' [.., 1, S, D]

Each softmax then weighs values of its own, as an attention block does. A product is linear in its left operand, and
its batch dimensions stand beside each other: only rounding differs.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from kvcompile.passes.graph import call, expr, is_size, shape, target_name, value

aten = torch.ops.aten
_PRODUCT = (aten.matmul.default, aten.bmm.default)
_SUMS = (aten.sub.Tensor, aten.add.Tensor)
_CASTS = ("to", "_to_copy", "type_as")
_SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)


def distribute(graph: Graph) -> int:
    """Spell products of sums of probabilities as sums of products, in place; returns how many there were."""
    found = 0
    for node in list(graph.nodes):
        left = node.args[0] if node.op == "call_function" and node.target in _PRODUCT else None
        while isinstance(left, Node) and target_name(left) in _CASTS:
            left = left.args[0]
        if isinstance(left, Node) and left.target in _SUMS and _is_of_probabilities(left):
            right = node.args[1]
            assert isinstance(right, Node)
            with graph.inserting_before(node):
                result = _product(graph, left, right, node, {})
                if value(result).dtype != value(node).dtype:
                    result = call(graph, aten.to.dtype, (result, value(node).dtype), node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
            found += 1
    return found


def _is_of_probabilities(node: Node) -> bool:
    """Whether both summands, of one shape [.., S, S], are softmaxes over the keys, or parts or multiples of them."""
    sides = node.args[:2]
    return all(isinstance(side, Node) and _sizes(side) == _sizes(node) and _softmax(side) for side in sides)


def _softmax(node: Node) -> bool:
    """Whether it is a softmax over its last dimension, which grows, but for what is undone by `_product`."""
    if node.target in _SOFTMAX:
        dim = node.args[1]
        over_keys = isinstance(dim, int) and dim % len(shape(node)) == len(shape(node)) - 1
        return over_keys and bool(expr(shape(node)[-1]).free_symbols)
    if node.target in _SUMS:
        return _is_of_probabilities(node)
    if node.target is aten.mul.Tensor:
        return any(_softmax(one) for one, _ in _factors(node))
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return False
    if node.target is aten.select.int:
        return _is_of_batch(node) and _softmax(source)
    if target_name(node) in _CASTS:
        return _softmax(source)
    if target_name(node) in ("reshape", "unflatten"):  # of other dimensions than the queries and the keys
        return _sizes(source)[-2:] == _sizes(node)[-2:] and _softmax(source)
    return False


def _factors(node: Node) -> list[tuple[Node, Any]]:
    """The ways to take a product apart into something of its shape and a factor that is the same for all keys."""
    one, other = node.args[:2]
    return [
        (a, b)
        for a, b in ((one, other), (other, one))
        if isinstance(a, Node) and _sizes(a) == _sizes(node) and _is_one_for_keys(b)
    ]


def _is_one_for_keys(factor: Any) -> bool:
    sizes = shape(factor) if isinstance(factor, Node) else ()
    return not sizes or is_size(sizes[-1], sympy.Integer(1))


def _sizes(node: Node) -> list[sympy.Expr]:
    return [expr(size) for size in shape(node)]


def _is_of_batch(node: Node) -> bool:
    """Whether a select chooses along a dimension before those of queries and keys."""
    dim, rank = node.args[1], len(shape(node)) + 1
    return isinstance(dim, int) and 0 < dim % rank < rank - 2 and isinstance(node.args[2], int)


def _product(
    graph: Graph, left: Node, right: Node, like: Node, known: dict[tuple[Node, Node | int], Node]
) -> Node:
    """left @ right, of what `_softmax` has looked at.

    known: products and unsqueezed operands that are there, by what they are of
    """
    if left.target in _SUMS:
        parts = [_product(graph, side, right, like, known) for side in left.args[:2]]  # type: ignore[arg-type]
        assert callable(left.target)
        return call(graph, left.target, tuple(parts), like, dict(left.kwargs))
    if left.target is aten.mul.Tensor:
        inner, factor = next(pair for pair in _factors(left) if _softmax(pair[0]))
        return call(graph, aten.mul.Tensor, (_product(graph, inner, right, like, known), factor), like)
    if left.target is aten.select.int and len(shape(right)) == len(shape(left)):
        source, dim, index = left.args
        assert isinstance(source, Node) and isinstance(dim, int)
        dim %= len(shape(source))
        if (right, dim) not in known:
            known[right, dim] = call(graph, aten.unsqueeze.default, (right, dim), like)
        beside = known[right, dim]
        whole = _product(graph, source, beside, like, known)
        return call(graph, aten.select.int, (whole, dim, index), like)
    if (left, right) not in known:
        dtype = value(right).dtype  # a sum that is rounded as a whole is now one of rounded summands
        rounded = left if value(left).dtype == dtype else call(graph, aten.to.dtype, (left, dtype), like)
        known[left, right] = call(graph, aten.matmul.default, (rounded, right), like)
    return known[left, right]
