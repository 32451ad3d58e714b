"""Sorts: sort, argsort, topk, and the lists that routers of experts make.

Along free dimensions each token sorts its own. A whole list [rows x tokens x choices] that is sorted is a *sorted
list*: the same elements in another order, which is no function of one token; but what is done to each element there and
put back to its own place is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments, is_tensor
from kvcompile.passes.dependence.facts import (
    Choice,
    Dim,
    Fact,
    Factor,
    Level,
    Located,
    Reason,
    anything,
    mixing,
)
from kvcompile.passes.dependence.pointwise import as_values, told
from kvcompile.passes.dependence.sizes import ONE, Size


def _sort(ctx: Context, node: Node) -> Result:
    """sort, argsort: values and their indices."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    dim = int(given.get("dim", -1)) % max(len(source.dims), 1)
    alone = is_tensor(node)
    descending = bool(given.get("descending", False))
    inverse = _inverse(ctx, node, source, dim) if alone and not descending else None
    if inverse is not None:
        return inverse
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    if not source.dims or source.only_free(dim):
        count = 1
        for factor in source.dims[dim] if source.dims else ():
            count *= factor.size.number
        picked = replace(source.plain(), knows=Choice(count))
        return picked if alone else (source.plain(), picked)
    if len(source.dims) > 1 or descending or any(factor.role == "sorted" for factor in source.dims[0]):
        return anything(node, f"it sorts {told(source)} along rows or tokens", (source,))
    of = source.dims[0]
    dims: tuple[Dim, ...] = ((Factor("sorted", _size(of), node, of),),)
    known = source.knows
    values = replace(
        source.plain(),
        dims=dims,
        knows=Choice(known.count, known.origin) if isinstance(known, Choice) else None,
    )
    places = located(node, of, dims)
    return places if alone else (values, places)


def _size(of: Dim) -> Size:
    whole = ONE
    for factor in of:
        whole = whole * factor.size
    return whole


def located(node: Node, of: tuple[Factor, ...], dims: tuple[Dim, ...]) -> Fact:
    """Each element's own place in the list `of`: a number that no token has by itself, but a good index."""
    text = mixing(node, "it computes with the places of rows or tokens in a list")
    return Fact(dims, Level.ANYTHING, Reason(text, node), knows=Located(of))


def _inverse(ctx: Context, node: Node, source: Fact, dim: int) -> Fact | None:
    """argsort of the places that a sort gave: where each element went."""
    sort = source.dims[0][0] if len(source.dims) == 1 and len(source.dims[0]) == 1 else None
    if sort is None or sort.role != "sorted" or not isinstance(source.knows, Located):
        return None
    return located(node, (sort,), (sort.of,)) if source.knows.of == sort.of else None


def _topk(ctx: Context, node: Node) -> Result:
    """topk over a free dimension; its indices choose among that many."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    dim = int(given["dim"]) % len(source.dims)
    values = node.meta["val"]
    if not source.only_free(dim) or any(isinstance(each, Node) for each in node.args[1:]):
        return anything(node, f"the greatest of {told(source)} along rows or tokens", (source,))
    assert isinstance(values[0], torch.Tensor)
    wanted = ctx.size(values[0].shape[dim])
    if wanted is None or wanted.symbols:
        return anything(node, "as many as a computed number", (source,))
    part: Dim = () if wanted == ONE else (Factor("free", wanted),)
    dims = (*source.dims[:dim], part, *source.dims[dim + 1 :])
    count = 1
    for factor in source.dims[dim]:
        count *= factor.size.number
    found = replace(source.plain(), dims=dims)
    return found, replace(found, knows=Choice(count, node))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten::sort", "aten::argsort"), _sort),
    "aten::topk": _topk,
}

__all__ = ["RULES", "located"]
