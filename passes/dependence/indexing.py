"""Indexing: index, gather, embedding, index_select, take_along_dim; scatter, index_put, index_add.

A token may look up anything in a table of free dimensions, by its id or its position: that is pointwise in the
index. It may not look up other tokens. Lists of tokens that a router sorted are looked up, and put back, by the places
of their own elements.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments, is_tensor
from kvcompile.passes.dependence.experts import marked
from kvcompile.passes.dependence.facts import (
    Choice,
    Dim,
    Fact,
    Factor,
    Kept,
    Level,
    Located,
    anything,
    compact,
    joined,
)
from kvcompile.passes.dependence.pointwise import aligned, as_values, told
from kvcompile.passes.dependence.sizes import Size
from kvcompile.passes.dependence.sorting import located
from kvcompile.passes.graph import target_name


def _embedding(ctx: Context, node: Node) -> Result:
    """embedding(weight [V, D], index): weight[index]"""
    return _looked_up(ctx, node, ctx.fact(node.args[0]), [node.args[1]])


def _index_select(ctx: Context, node: Node) -> Result:
    """source.index_select(dim, index): a list of indices along one dimension."""
    given = arguments(node)
    source = ctx.fact(node.args[0])
    dim = int(given["dim"]) % len(source.dims)
    return _looked_up(ctx, node, source, [*([None] * dim), given["index"]])


def _index(ctx: Context, node: Node) -> Result:
    """source[i0, :, i1, ..]"""
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    return _looked_up(ctx, node, ctx.fact(node.args[0]), list(indices))


def _looked_up(ctx: Context, node: Node, source: Fact, indices: list[object]) -> Fact:
    """source[indices], None for a whole dimension. Dimensions that are indexed go; those of the indices come."""
    indices = indices + [None] * (len(source.dims) - len(indices))
    places = [dim for dim, index in enumerate(indices) if index is not None]
    first = indices[0]
    if places == [0] and isinstance(first, Node) and _is_mask(first):
        return _chosen(ctx, node, source, first)
    given = [index for index in indices if isinstance(index, Node)]
    if any(node_.meta["val"].dtype.is_floating_point or _is_mask(node_) for node_ in given):
        return anything(
            node, "a selection by a mask, of which the number of elements is not known", (source,)
        )
    facts = [ctx.fact(index) for index in given]
    if source.level == Level.ANYTHING:
        return _of_places(ctx, node, source, facts, places)
    size = max((len(fact.dims) for fact in facts), default=0)
    dims = aligned([fact.dims for fact in facts], size)
    if dims is None or len(facts) != len(places):
        return anything(node, f"indices {' and '.join(map(told, facts))}", (*facts, source))
    depends = [source]
    for place, fact in zip(places, facts, strict=True):
        own = source.dims[place]
        if isinstance(fact.knows, Kept):
            if own != (Factor("token", Size(1, (ctx.seq,))),):
                return anything(
                    node, "the indices of wanted logits choose something else than tokens", (source,)
                )
        elif isinstance(fact.knows, Located) and fact.level == Level.ANYTHING:
            if own != fact.knows.of:
                return anything(node, f"places in another list index {told(source)}", (source,))
        elif not all(factor.role == "free" for factor in own):
            return _of_tokens(node, fact, source)
        elif fact.level == Level.ANYTHING:
            return as_values(node, fact)
        else:
            depends.append(fact)
    consecutive = places == list(range(places[0], places[0] + len(places))) if places else True
    rest = [dim for place, dim in enumerate(source.dims) if place not in places]
    at = places[0] if consecutive and places else 0
    found = replace(joined(depends), dims=(*rest[:at], *dims, *rest[at:]))
    choice = source.knows if isinstance(source.knows, Choice) else None
    return replace(found, knows=None if choice is None else Choice(choice.count))


def _of_tokens(node: Node, index: Fact, source: Fact) -> Fact:
    if source.level == Level.CONSTANT:
        return anything(node, f"it chooses among rows or tokens of {told(source)}", (index,))
    if index.level == Level.POSITION:
        return anything(node, f"positions index the tokens' own values in {target_name(node)}", (source,))
    return anything(
        node, f"computed numbers index the tokens' own values in {target_name(node)}", (index, source)
    )


def _of_places(ctx: Context, node: Node, source: Fact, facts: list[Fact], places: list[int]) -> Fact:
    """A list of places, taken in another order."""
    if len(facts) == 1 and places == [0] and isinstance(source.knows, Located) and len(source.dims) == 1:
        index = facts[0]
        if isinstance(index.knows, Located) and source.dims[0] == index.knows.of:
            return located(node, source.knows.of, index.dims)
    return as_values(node, source)


def _gather(ctx: Context, node: Node) -> Result:
    """gather, take_along_dim: along one dimension, which is free; the others line up."""
    source, index = (
        ctx.fact(node.args[0]),
        ctx.fact(node.args[2] if target_name(node) == "gather" else node.args[1]),
    )
    given = arguments(node)
    for fact in (source, index):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    if given.get("dim") is None:
        return anything(node, "over all elements", (source, index))
    dim = int(given["dim"]) % len(source.dims)
    if not source.only_free(dim):
        return _of_tokens(node, index, source)
    for place, (own, other) in enumerate(zip(source.dims, index.dims, strict=True)):
        # A shorter index takes the first of a free dimension; of the others it takes all.
        if place != dim and own != other and not _free_part(own, other):
            return anything(node, f"the indices {told(index)} of {told(source)}", (source, index))
    return replace(joined([source, index]), dims=index.dims)


def _free_part(whole: Dim, part: Dim) -> bool:
    return all(factor.role == "free" for factor in (*whole, *part))


def _scatter(ctx: Context, node: Node) -> Result:
    """scatter, scatter_add, scatter_reduce along a free dimension: each token writes into its own."""
    given = arguments(node)
    target, index = ctx.fact(node.args[0]), ctx.fact(given["index"])
    source = given.get("src", given.get("value"))
    written = ctx.fact(source) if isinstance(source, Node) and is_tensor(source) else Fact((), Level.CONSTANT)
    for fact in (target, index, written):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    dim = int(given["dim"]) % len(target.dims)
    if not target.only_free(dim) or not index.only_free(dim):
        return anything(node, f"it writes along rows or tokens of {told(target)}", (target, index, written))
    for place in range(len(target.dims)):
        own = {target.dims[place], index.dims[place], *((written.dims[place],) if written.dims else ())}
        if (
            place != dim
            and len(own) > 1
            and not all(factor.role == "free" for dims in own for factor in dims)
        ):
            return anything(node, f"it writes {told(written)} into {told(target)}", (target, index, written))
        if place == dim and not all(factor.role == "free" for dims in own for factor in dims):
            return anything(node, f"it writes {told(written)} into {told(target)}", (target, index, written))
    found = replace(joined([target, index, written]), dims=target.dims)
    return replace(found, knows=marked(node, index, source, dim))


def _put(ctx: Context, node: Node) -> Result:
    """index_put, index_add, index_copy, put back by the places of the elements: a list in its own order again."""
    name = target_name(node)
    target = ctx.fact(node.args[0])
    given = arguments(node)
    if name in ("index_put", "_unsafe_index_put"):
        indices, values = given["indices"], given["values"]
        adds = bool(given.get("accumulate", False))
        dim = 0
    else:
        indices, values, dim = [given["index"]], given["source"], int(given["dim"])
        adds = name == "index_add"
    if len(indices) == 1 and isinstance(indices[0], Node) and _is_mask(indices[0]):
        return _where(ctx, node, indices[0], values, adds)
    if len(indices) != 1 or not isinstance(indices[0], Node) or dim != 0:
        return _into_free(ctx, node, target, indices, values, dim)
    index, written = ctx.fact(indices[0]), ctx.fact(values)
    if not isinstance(index.knows, Located) or len(index.dims) != 1:
        return _into_free(ctx, node, target, indices, values, dim)
    of, listed = index.knows.of, index.dims[0]
    # Every place of the list is written where the places are those of a whole sorted list, in its order.
    whole = len(listed) == 1 and listed[0].role == "sorted" and listed[0].of == of
    if whole and not adds and isinstance(written.knows, Located) and len(written.dims) == 1:
        if written.dims[0] in (listed, of) and written.knows.of == of:  # 0, 1, 2, ..: where each element went
            return located(node, (listed[0],), (of,))
        return as_values(node, written)
    if written.level == Level.ANYTHING:
        return as_values(node, written)
    if not written.dims or written.dims[0] != listed:
        return anything(node, f"it puts {told(written)} at the places of {told(index)}", (written,))
    if whole and not adds:
        return replace(joined([written]), dims=(of, *written.dims[1:]))
    if target.level == Level.ANYTHING:
        return as_values(node, target)
    own = _own_places(listed, of)
    if not adds or not own or target.dims[0] != of or target.dims[1:] != written.dims[1:]:
        return anything(node, f"it puts {told(written)} at places in {told(target)}", (target, written))
    return replace(joined([target, written]), dims=target.dims)


def _chosen(ctx: Context, node: Node, source: Fact, mask: Node) -> Fact:
    """x[mask]: the rows or tokens that a mask over the first dimensions shows, as a list."""
    shown, size = ctx.fact(mask), ctx.size(node.meta["val"].shape[0])
    for fact in (source, shown):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    count = len(shown.dims)
    if shown.dims != source.dims[:count] or size is None:
        return anything(node, f"a mask {told(shown)} chooses among {told(source)}", (source, shown))
    of = tuple(factor for dim in shown.dims for factor in dim)
    chosen = Factor("chosen", size, mask, of)
    return replace(joined([source, shown]), dims=((chosen,), *source.dims[count:]))


def _is_mask(index: Node) -> bool:
    return bool(index.meta["val"].dtype == torch.bool)


def _where(ctx: Context, node: Node, mask: Node, values: object, adds: bool) -> Fact:
    """x[mask] = a number, or what was x[mask] before: each element changes at its own place."""
    target, shown = ctx.fact(node.args[0]), ctx.fact(mask)
    written = ctx.fact(values)
    for fact in (target, shown, written):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    own = written.dims[0][0] if written.dims and len(written.dims[0]) == 1 else None
    back = own is not None and own.role == "chosen" and own.by is mask  # the chosen ones, to their own places
    if (
        back
        and shown.dims == target.dims[: len(shown.dims)]
        and written.dims[1:] == target.dims[len(shown.dims) :]
    ):
        return replace(joined([target, shown, written]), dims=target.dims)
    if any(dim for dim in written.dims) or shown.dims != target.dims[: len(shown.dims)] or adds:
        return anything(
            node, f"it writes {told(written)} where a mask {told(shown)} shows", (target, shown, written)
        )
    return replace(joined([target, shown, written]), dims=target.dims)


def _own_places(listed: Dim, of: Dim) -> bool:
    """Whether a list goes over `of`, some times each."""
    factors = listed[0].of if len(listed) == 1 and listed[0].role == "sorted" else listed
    return factors[: len(of)] == of and all(factor.role == "free" for factor in factors[len(of) :])


def _into_free(
    ctx: Context, node: Node, target: Fact, indices: list[object], values: object, dim: int
) -> Fact:
    """Writing at computed places of free dimensions, which are not told apart: into constants, with constants."""
    facts = [ctx.fact(each) for each in (*indices, values) if isinstance(each, Node)]
    for fact in (target, *facts):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    if all(fact.level == Level.CONSTANT for fact in (target, *facts)) and all(
        factor.role == "free" for fact in (target, *facts) for dims in fact.dims for factor in dims
    ):
        return replace(joined([target, *facts]), dims=target.dims)
    return anything(node, f"it writes at computed places of {told(target)}", (target, *facts))


def _one_hot(ctx: Context, node: Node) -> Result:
    """one_hot(index, n): a row of n for each."""
    source, classes = ctx.fact(node.args[0]), arguments(node).get("num_classes")
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    if not isinstance(classes, int) or classes < 1:
        return anything(node, "as many classes as there are in the values of all tokens", (source,))
    return replace(source.plain(), dims=(*source.dims, compact((Factor("free", Size(classes)),))))


RULES: dict[str, Rule] = {
    "aten::embedding": _embedding,
    "aten::index_select": _index_select,
    **dict.fromkeys(("aten::index", "aten::_unsafe_index"), _index),
    **dict.fromkeys(("aten::gather", "aten::take_along_dim"), _gather),
    **dict.fromkeys(("aten::scatter", "aten::scatter_add", "aten::scatter_reduce"), _scatter),
    **dict.fromkeys(
        ("aten::index_put", "aten::_unsafe_index_put", "aten::index_add", "aten::index_copy"), _put
    ),
    "aten::one_hot": _one_hot,
}
