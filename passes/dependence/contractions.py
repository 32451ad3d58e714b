"""Contractions: products that sum over a dimension. That dimension must be free; the others stay as they are.

    matmul, bmm, mm, mv, dot, linear, addmm, addbmm, baddbmm, einsum, tensordot-like products

Two operands that bring tokens each make pairs of tokens, and a sum over tokens mixes them: both are attention, or what
a cache cannot hold.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments, nodes_in, rank
from kvcompile.passes.dependence.facts import Dim, Fact, Level, anything, joined
from kvcompile.passes.dependence.pointwise import aligned, as_values, told


def product(node: Node, left: Fact, right: Fact) -> Fact:
    """[.., M, K] @ [.., K, N]; of vectors [K] the dimension goes."""
    for fact in (left, right):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    a = left.dims if len(left.dims) > 1 else ((), *left.dims)
    b = right.dims if len(right.dims) > 1 else (*right.dims, ())
    if not _free(a[-1]) or not _free(b[-2]):
        return anything(
            node, f"a product of {told(left)} and {told(right)} over rows or tokens", (left, right)
        )
    batch = aligned([a[:-2], b[:-2]], max(len(a), len(b)) - 2)
    if batch is None:
        return anything(node, f"a product of {told(left)} and {told(right)}", (left, right))
    rows = (a[-2],) if len(left.dims) > 1 else ()
    columns = (b[-1],) if len(right.dims) > 1 else ()
    return replace(joined([left, right]), dims=(*batch, *rows, *columns))


def _free(dim: Dim) -> bool:
    return all(factor.role == "free" for factor in dim)


def _turned(fact: Fact) -> Fact:
    """A matrix transposed."""
    if len(fact.dims) < 2:
        return fact
    return replace(fact, dims=(*fact.dims[:-2], fact.dims[-1], fact.dims[-2]))


def _matmul(ctx: Context, node: Node) -> Result:
    return product(node, ctx.fact(node.args[0]), ctx.fact(node.args[1]))


def _linear(ctx: Context, node: Node) -> Result:
    """x W^T + bias"""
    source, weight = ctx.fact(node.args[0]), ctx.fact(node.args[1])
    found = product(node, source, _turned(weight))
    return plus(ctx, node, found, arguments(node).get("bias"))


def plus(ctx: Context, node: Node, found: Fact, bias: object) -> Fact:
    """A product with something added."""
    if not isinstance(bias, Node) or found.level == Level.ANYTHING:
        return found
    added = ctx.fact(bias)
    if added.level == Level.ANYTHING:
        return as_values(node, added)
    dims = aligned([found.dims, added.dims], rank(node))
    if dims is None:
        return anything(node, f"it adds {told(added)} to {told(found)}", (found, added))
    return replace(joined([found, added]), dims=dims)


def _addmm(ctx: Context, node: Node) -> Result:
    """addmm, baddbmm, addmv: bias + a @ b"""
    found = product(node, ctx.fact(node.args[1]), ctx.fact(node.args[2]))
    return plus(ctx, node, found, node.args[0])


def _outer(ctx: Context, node: Node) -> Result:
    left, right = (ctx.fact(arg) for arg in node.args[:2])
    for fact in (left, right):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    return replace(joined([left, right]), dims=(left.dims[0], right.dims[0]))


def _einsum(ctx: Context, node: Node) -> Result:
    """Each label has one dimension's factors everywhere; labels that are summed over must be free."""
    operands = [ctx.fact(each) for each in nodes_in(node.args[1])]
    for fact in operands:
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    equation = str(node.args[0]).replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or any(len(set(term)) != len(term) for term in terms):
        return anything(node, f"the equation {equation}", operands)
    labels: dict[str, Dim] = {}
    for term, fact in zip(terms, operands, strict=True):
        for label, dim in zip(term, fact.dims, strict=True):
            known = labels.get(label, ())
            if known and dim and known != dim:
                return anything(node, f"{label} of {equation} is not the same in all operands", operands)
            labels[label] = known or dim
    if not all(_free(dim) for label, dim in labels.items() if label not in out):
        return anything(node, f"{equation} sums over rows or tokens", operands)
    return replace(joined(operands), dims=tuple(labels[label] for label in out))


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("aten::matmul", "aten::bmm", "aten::mm", "aten::mv", "aten::dot", "aten::linalg_matmul"), _matmul
    ),
    "aten::linear": _linear,
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmv"), _addmm),
    **dict.fromkeys(("aten::outer", "aten::ger"), _outer),
    "aten::einsum": _einsum,
}

__all__ = ["RULES", "plus", "product"]
