"""Indexing: the element at places that other elements are."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.expression import Expr
from kvcompile.passes.graph import shape, value
from kvcompile.passes.score_mod.leaves import Untranslatable
from kvcompile.passes.score_mod.make import add, le, make, where
from kvcompile.passes.score_mod.translate import Places, Rule, Translator


def _wrapped(t: Translator, node: Node, source: Node, dim: int, place: Expr) -> Expr:
    """A place that may count from the end of a dimension. Tables wrap when they are read."""
    from kvcompile.expression import integer

    if t.tables.has(source) or t.prover.holds(le(integer(0), place)):
        return place
    size = t.number(shape(source)[dim], torch.int64)
    return where(le(integer(0), place), place, add(place, size))


def _index(t: Translator, node: Node, places: Places) -> Expr:
    source, indices = node.args[0], node.args[1]
    assert isinstance(source, Node) and isinstance(indices, (list, tuple))
    chosen = [(dim, index) for dim, index in enumerate(indices) if isinstance(index, Node)]
    if any(value(index).dtype in (torch.bool, torch.uint8) for _, index in chosen):
        raise Untranslatable(f"{node.target} by a mask", node)
    rank = max(len(shape(index)) for _, index in chosen)
    dims = [dim for dim, _ in chosen]
    together = dims == list(range(dims[0], dims[-1] + 1))
    first = dims[0] if together else 0  # where the dimensions of the indices stand in the result
    own = places[first : first + rank]
    rest = iter(places[:first] + places[first + rank :])
    found = []
    known = dict(chosen)
    for dim in range(len(shape(source))):
        if dim not in known:
            found.append(next(rest))
            continue
        index = known[dim]
        found.append(_wrapped(t, node, source, dim, t.element(index, t.broadcast(index, own))))
    return t.element(source, tuple(found))


def _index_select(t: Translator, node: Node, places: Places) -> Expr:
    source, dim, index = node.args[:3]
    assert isinstance(source, Node) and isinstance(dim, int) and isinstance(index, Node)
    dim %= len(places)
    place = t.element(index, (places[dim],) if shape(index) else ())
    return t.element(source, (*places[:dim], place, *places[dim + 1 :]))


def _embedding(t: Translator, node: Node, places: Places) -> Expr:
    weight, index = node.args[:2]
    assert isinstance(weight, Node) and isinstance(index, Node)
    return t.element(weight, (t.element(index, places[:-1]), places[-1]))


def _gather(t: Translator, node: Node, places: Places) -> Expr:
    source, dim, index = node.args[:3]
    assert isinstance(source, Node) and isinstance(dim, int) and isinstance(index, Node)
    dim %= len(places)
    place = t.element(index, places)
    return t.element(source, (*places[:dim], place, *places[dim + 1 :]))


def _diff(t: Translator, node: Node, places: Places) -> Expr:
    """diff(x, 1, dim, prepend): x_i - x_(i - 1), the first from what is put before."""
    from kvcompile.expression import integer
    from kvcompile.passes.score_mod.make import lt, sub

    arguments = [*node.args, *[None] * (5 - len(node.args))]
    source, times, dim, before, after = arguments
    dim = -1 if dim is None else dim
    assert isinstance(source, Node) and isinstance(dim, int)
    if times not in (None, 1) or after is not None or value(node).dtype is torch.bool:
        raise Untranslatable(f"no translation of {node.target}", node)
    dim %= len(places)

    def at(place: Expr) -> Expr:
        assert isinstance(source, Node)
        return t.element(source, (*places[:dim], place, *places[dim + 1 :]))

    dtype = value(node).dtype
    if before is None:
        return make("sub", dtype, at(add(places[dim], integer(1))), at(places[dim]))
    if not isinstance(before, Node) or int(shape(before)[dim]) != 1:
        raise Untranslatable(f"no translation of {node.target}", node)
    own = t.element(before, (*places[:dim], integer(0), *places[dim + 1 :]))
    last = where(lt(places[dim], integer(1)), own, at(sub(places[dim], integer(1))))
    return make("sub", dtype, at(places[dim]), last)


RULES: dict[str, Rule] = {
    "index": _index,
    "index_select": _index_select,
    "embedding": _embedding,
    "gather": _gather,
    "take_along_dim": _gather,
    "diff": _diff,
}
