"""Contractions: products that sum over a dimension of both operands. Where that is cut, the ranks' results are added.

linear(x [.., K], w [N, K], b [N])       -> [.., N]
mm, bmm, matmul(a [.., M, K], b [.., K, N]) -> [.., M, N];   addmm(c, a, b) = c + a b
grouped_mm(x [M, K], w [E, K, N], ends)  -> [M, N]           rows of x in groups, a matrix for each
"""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.passes.dependence.context import arguments
from kvcompile.passes.shard.form import Form, Sum, pairs_from_right, sizes
from kvcompile.passes.shard.ties import Tie, along

aten = torch.ops.aten


def _linear(node: Node) -> Form | None:
    x, weight = node.args[:2]
    bias = arguments(node).get("bias")
    assert isinstance(x, Node) and isinstance(weight, Node)
    fixed = sizes(x)
    last = len(fixed) - 1
    if len(sizes(weight)) != 2 or x is weight:
        return None
    ties = [
        *along(x, [(d, d) for d in range(last) if fixed[d] is not None]),
        Tie(weight, (0,), (last,)),
    ]
    added = bias if isinstance(bias, Node) else None
    if added is not None:
        ties.append(Tie(added, (0,), (last,)))
    bare = (aten.linear.default, (x, weight))
    return Form(tuple(ties), Sum(x, last, weight, 1), bare, added)


def _matmul(node: Node) -> Form | None:
    a, b = node.args[:2]
    assert isinstance(a, Node) and isinstance(b, Node)
    return _product(node, a, b, None)


def _addmm(node: Node) -> Form | None:
    """addmm, baddbmm with both factors one."""
    c, a, b = node.args[:3]
    assert isinstance(a, Node) and isinstance(b, Node) and isinstance(c, Node)
    if any(arguments(node).get(name, 1) != 1 for name in ("beta", "alpha")):
        return None
    return _product(node, a, b, c)


def _product(node: Node, a: Node, b: Node, added: Node | None) -> Form | None:
    left, right, result = sizes(a), sizes(b), sizes(node)
    if min(len(left), len(right)) < 2 or a is b or added in (a, b):
        return None
    last = len(result) - 1
    rows, columns = len(left) - 2, len(right) - 1
    ties: list[Tie] = []
    for operand, own, skipped in ((a, left, len(left) - 1), (b, right, len(right) - 2)):
        shift = len(result) - len(own)
        batch = [
            (d, d + shift) for d in range(len(own) - 2) if own[d] is not None and own[d] == result[d + shift]
        ]
        ties += along(operand, [pair for pair in batch if (own[pair[0]] or 0) > 1])
        assert skipped < len(own)
    if left[rows] is not None:
        ties.append(Tie(a, (rows,), (last - 1,)))
    if right[columns] is not None:
        ties.append(Tie(b, (columns,), (last,)))
    if added is not None:
        ties += along(added, pairs_from_right(added, result))
    target = {2: aten.mm.default, 3: aten.bmm.default}.get(len(result), aten.matmul.default)
    if len(left) != len(right):
        target = aten.matmul.default
    return Form(tuple(ties), Sum(a, len(left) - 1, b, len(right) - 2), (target, (a, b)), added)


def _grouped(node: Node) -> Form | None:
    x, weight = node.args[:2]
    given = arguments(node)
    assert isinstance(x, Node) and isinstance(weight, Node)
    ends = given.get("offs")
    if len(sizes(x)) != 2 or len(sizes(weight)) != 3 or given.get("bias") is not None:
        return None
    if not isinstance(ends, Node) or ends in (x, weight):
        return None
    # Its kernels want rows of whole 16 bytes: what is cut, is cut so (`wishes.py`), or is not cut.
    unit = 16 // weight.meta["val"].element_size()
    if any((size or 0) % unit for size in sizes(weight)[1:]):
        return None
    ties = (Tie(weight, (2,), (1,)),)
    return Form(ties, Sum(x, 1, weight, 1), (node.target, (x, weight, ends)))


RULES = {
    "aten::linear": _linear,
    **dict.fromkeys(("aten::matmul", "aten::mm", "aten::bmm"), _matmul),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), _addmm),
    **dict.fromkeys(("aten::_grouped_mm", "aten::grouped_mm", "transformers::grouped_mm_fallback"), _grouped),
}
