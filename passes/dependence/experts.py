"""Experts: lists of tokens in the order of their experts, with a product for each expert.

    sort the ids of rows x tokens x choices; take each token's values in that order; multiply the rows of expert e, of
    which there are as many as e was chosen, with its matrix; put the results back to their own places.

Every row meets the matrix of its own expert, however many rows and tokens there are: no token depends on another. But
that holds only where the rows are counted from the very ids that they were sorted by. A capacity, beyond which an
expert drops tokens, is a count up to a token and is refused (a cumulative sum).
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments
from kvcompile.passes.dependence.contractions import plus
from kvcompile.passes.dependence.facts import (
    Choice,
    Counts,
    Dim,
    Fact,
    Factor,
    Level,
    anything,
    compact,
    joined,
)
from kvcompile.passes.dependence.pointwise import as_values
from kvcompile.passes.dependence.sizes import Size
from kvcompile.passes.graph import target_name


def _grouped(ctx: Context, node: Node) -> Result:
    """grouped_mm(x [M, K], w [E, K, N], ends [E]): rows up to ends[0] with w[0], up to ends[1] with w[1], ..

    That is a function of each row alone where the rows stand in the order of their experts and the ends are counted
    from the very same experts: then row r meets the matrix of its own expert, however many rows there are.
    """
    given = arguments(node)
    source, weight = (ctx.fact(arg) for arg in node.args[:2])
    ends = ctx.fact(given.get("offs"))
    factor = source.dims[0][0] if source.dims and len(source.dims[0]) == 1 else None
    known = ends.knows
    if factor is None or factor.role != "sorted" or factor.by is None:
        return anything(node, "rows that are not known to stand in the order of their groups", (source,))
    ids = ctx.fact(factor.by.args[0])
    choice = ids.knows
    same = (
        isinstance(known, Counts)
        and known.summed
        and isinstance(choice, Choice)
        and choice.origin is not None
        and choice.origin is known.origin
        and choice.count <= known.count
    )
    whole = len(weight.dims) == 3 and len(source.dims) == 2
    groups = (
        whole
        and weight.dims[0]
        and isinstance(known, Counts)
        and weight.dims[0][0].size.number == known.count
    )
    groups = groups or (whole and not weight.dims[0] and isinstance(known, Counts) and known.count == 1)
    if not same or not groups or weight.level != Level.CONSTANT or not source.only_free(1):
        return anything(node, "groups that are not counted from the order of its rows", (source, weight))
    limits = joined([source, weight, replace(ends, level=Level.CONSTANT, why=None), ids])
    return plus(ctx, node, replace(limits, dims=(source.dims[0], weight.dims[2])), given.get("bias"))


def _histogram(ctx: Context, node: Node) -> Result:
    """histc, bincount of experts: how often each is chosen, by all tokens; good for the ends of their groups alone."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    known = source.knows
    refused = anything(node, f"{target_name(node)} counts over rows or tokens", (source,))
    if not isinstance(known, Choice) or known.origin is None:
        return refused
    if target_name(node) == "histc":
        bins = given["bins"]
        if given["min"] != 0 or given["max"] != bins - 1 or bins < known.count or bins < 2:
            return refused
    else:
        bins = given["minlength"]
        if given.get("weights") is not None or bins < known.count:
            return refused
    dims: tuple[Dim, ...] = (compact((Factor("free", Size(bins)),)),)
    return replace(
        refused, dims=dims, knows=Counts(bins, known.origin), limit=source.limit, opaque=source.opaque
    )


def marked(node: Node, index: Fact, value: object, dim: int) -> Counts | None:
    """zeros [.., E] with a one at each choice: what counts them when it is added up."""
    known, target = index.knows, node.args[0]
    if not isinstance(known, Choice) or known.origin is None or not isinstance(target, Node) or value != 1:
        return None
    zeros = target.target is not None and target_name(target) in ("zeros", "zeros_like", "new_zeros")
    places = target.meta["val"].shape
    last = dim == len(places) - 1 and places[dim] == known.count and target_name(known.origin) == "topk"
    return (
        Counts(known.count, known.origin, marks=True)
        if zeros and last and target_name(node) == "scatter"
        else None
    )


def added_up(source: Fact, gone: set[int], refused: Fact) -> Fact:
    """The counts of experts, from the marks of all tokens; still no token's own."""
    known = source.knows
    whole = gone == set(range(len(source.dims) - 1))
    if not isinstance(known, Counts) or not known.marks or not whole:
        return refused
    counts = replace(known, marks=False)
    return replace(refused, dims=source.dims[-1:], knows=counts, limit=source.limit, opaque=source.opaque)


def one_count(known: Counts, place: int) -> Counts | None:
    """One of the counts, taken out."""
    return None if known.summed or known.marks or known.place is not None else replace(known, place=place)


def parts(ctx: Context, node: Node, source: Fact, sizes: list[object], dim: int) -> tuple[Fact, ...] | None:
    """A sorted list in pieces of the experts' counts: piece e has the rows of expert e."""
    factor = source.dims[dim][0] if dim == 0 and len(source.dims[dim]) == 1 else None
    if factor is None or factor.role != "sorted" or factor.by is None or factor.part is not None:
        return None
    choice = ctx.fact(factor.by.args[0]).knows
    counted = [ctx.fact(size).knows for size in sizes]
    if not isinstance(choice, Choice) or choice.origin is None or len(sizes) != choice.count:
        return None
    if counted != [Counts(len(sizes), choice.origin, place=place) for place in range(len(sizes))]:
        return None
    found = []
    for place, value in enumerate(node.meta["val"]):
        size = ctx.size(value.shape[0])
        if size is None:
            return None
        piece = Factor("sorted", size, factor.by, factor.of, place)
        found.append(replace(source.plain(), dims=((piece,), *source.dims[1:])))
    return tuple(found)


def together(ctx: Context, node: Node, sources: list[Fact], dim: int) -> Fact | None:
    """All pieces of a sorted list, in the order of the experts: the list again."""
    if dim != 0 or not all(len(fact.dims[0]) == 1 and fact.dims[0][0].role == "sorted" for fact in sources):
        return None
    pieces = [fact.dims[0][0] for fact in sources]
    first = pieces[0]
    choice = None if first.by is None else ctx.fact(first.by.args[0]).knows
    if not isinstance(choice, Choice) or [piece.part for piece in pieces] != list(range(choice.count)):
        return None
    alike = all((piece.by, piece.of) == (first.by, first.of) for piece in pieces)
    if not alike or len({fact.dims[1:] for fact in sources}) > 1:
        return None
    assert first.by is not None
    whole = ctx.fact(first.by.args[0]).dims[0]
    size = Size(1)
    for factor in whole:
        size = size * factor.size
    ctx.learn(node.meta["val"].shape[0], size)
    dims: tuple[Dim, ...] = ((Factor("sorted", size, first.by, first.of),), *sources[0].dims[1:])
    return replace(joined(sources), dims=dims)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten::_grouped_mm", "transformers::grouped_mm_fallback"), _grouped),
    **dict.fromkeys(("aten::histc", "aten::bincount"), _histogram),
}

__all__ = ["RULES", "added_up", "marked", "one_count", "parts", "together"]
