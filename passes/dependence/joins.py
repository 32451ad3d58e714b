"""Joins and moves along a dimension: cat, stack, pad, roll, flip.

All of them along free dimensions only: a sequence that is padded, rolled or joined with another has other tokens at
its places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from kvcompile.passes.dependence.context import (
    Context,
    Result,
    Rule,
    arguments,
    nodes_in,
    rank,
    whole_numbers,
)
from kvcompile.passes.dependence.experts import together
from kvcompile.passes.dependence.facts import Choice, Dim, Fact, Factor, Level, anything, compact, joined
from kvcompile.passes.dependence.pointwise import aligned, as_values, told
from kvcompile.passes.graph import target_name


def _cat(ctx: Context, node: Node) -> Result:
    """cat, concat: free dimensions become one longer one; the others line up."""
    sources = [ctx.fact(each) for each in nodes_in(node.args[0])]
    size = rank(node)
    sources = [fact for fact in sources if len(fact.dims) == size]  # torch ignores [0]
    dim = int(arguments(node).get("dim", 0)) % size
    unusable = next((fact for fact in sources if fact.level == Level.ANYTHING), None)
    if unusable is not None:
        return as_values(node, unusable)
    whole = together(ctx, node, sources, dim)
    if whole is not None:
        return whole
    if not all(fact.only_free(dim) for fact in sources):
        what = "the sequence" if any(f.role == "token" for s in sources for f in s.dims[dim]) else "rows"
        return anything(node, f"it joins along {what}", sources)
    return _joined(ctx, node, sources, dim, [(*f.dims[:dim], (), *f.dims[dim + 1 :]) for f in sources])


def _joined(ctx: Context, node: Node, sources: Sequence[Fact], dim: int, rest: list[tuple[Dim, ...]]) -> Fact:
    dims = aligned(rest, rank(node))
    length = ctx.size(node.meta["val"].shape[dim])
    if dims is None or length is None or length.symbols:
        return anything(node, f"it joins {' with '.join(map(told, sources))}", sources)
    placed = (*dims[:dim], compact((Factor("free", length),)), *dims[dim + 1 :])
    counts = [fact.knows.count for fact in sources if isinstance(fact.knows, Choice)]
    choice = Choice(max(counts)) if counts and len(counts) == len(sources) else None
    return replace(joined(sources), dims=placed, knows=choice)


def _stack(ctx: Context, node: Node) -> Result:
    """stack: a new dimension."""
    sources = [ctx.fact(each) for each in nodes_in(node.args[0])]
    dim = int(arguments(node).get("dim", 0)) % rank(node)
    unusable = next((fact for fact in sources if fact.level == Level.ANYTHING), None)
    if unusable is not None:
        return as_values(node, unusable)
    return _joined(ctx, node, sources, dim, [(*f.dims[:dim], (), *f.dims[dim:]) for f in sources])


def _pad(ctx: Context, node: Node) -> Result:
    """constant_pad_nd, pad: more of free dimensions."""
    source = ctx.fact(node.args[0])
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    amounts = node.args[1]
    assert isinstance(amounts, (list, tuple))
    size = rank(node)
    dims = list(source.dims)
    for back in range(len(amounts) // 2):
        dim = size - 1 - back
        if all(isinstance(each, int) and each == 0 for each in amounts[2 * back : 2 * back + 2]):
            continue
        length = ctx.size(node.meta["val"].shape[dim])
        if not source.only_free(dim) or length is None or length.symbols:
            return anything(node, f"it pads {told(source)} along rows or tokens", (source,))
        dims[dim] = compact((Factor("free", length),))
    return replace(source.plain(), dims=tuple(dims))


def _moved(ctx: Context, node: Node) -> Result:
    """roll, flip: other places along free dimensions."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    places = given.get("dims", given.get("dim"))
    chosen = {"fliplr": [1], "flipud": [0]}.get(target_name(node)) or whole_numbers(places)
    if chosen is None or any(isinstance(each, Node) for each in nodes_in(given.get("shifts"))):
        return anything(node, "it moves elements by a computed number", (source,))
    moved = chosen or list(range(len(source.dims)))  # roll without dimensions: all of them, flattened
    if not all(source.only_free(dim) for dim in moved):
        what = {"roll": "rolls", "flip": "turns round"}.get(target_name(node), "moves")
        return anything(node, f"it {what} {told(source)} along rows or tokens", (source,))
    return source.plain()


def _cartesian(ctx: Context, node: Node) -> Result:
    """meshgrid of two: pairs of whatever they have."""
    sources = [ctx.fact(each) for each in nodes_in(node.args[0])]
    unusable = next((fact for fact in sources if fact.level == Level.ANYTHING), None)
    if unusable is not None or node.kwargs.get("indexing", "ij") != "ij" or len(node.args) > 1:
        return anything(node, "a grid of them", sources)
    dims = tuple(fact.dims[0] if fact.dims else () for fact in sources)
    return tuple(replace(fact.plain(), dims=dims) for fact in sources)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten::cat", "aten::concat", "aten::concatenate"), _cat),
    "aten::stack": _stack,
    **dict.fromkeys(("aten::constant_pad_nd", "aten::pad"), _pad),
    **dict.fromkeys(("aten::roll", "aten::flip", "aten::fliplr", "aten::flipud"), _moved),
    "aten::meshgrid": _cartesian,
}
