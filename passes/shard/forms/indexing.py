"""Indexing: rows that an index chooses; whole in the dimension that it chooses from."""

from __future__ import annotations

from torch.fx import Node

from kvcompile.passes.dependence.context import arguments
from kvcompile.passes.shard.form import Form, sizes
from kvcompile.passes.shard.ties import Tie, along


def _index(node: Node) -> Form | None:
    """x[:, .., index, ..] with one index: its dimensions stand in the place of the one it chooses from."""
    source, given = node.args[:2]
    if not isinstance(source, Node) or not isinstance(given, (list, tuple)):
        return None
    places = [place for place, each in enumerate(given) if each is not None]
    if len(places) != 1:
        return None
    (place,) = places
    index = given[place]
    if not isinstance(index, Node) or index is source:
        return None
    more = len(sizes(index)) - 1
    if str(index.meta["val"].dtype) == "torch.bool":
        return None
    fixed = sizes(source)
    pairs = [
        (d, d if d < place else d + more) for d, size in enumerate(fixed) if d != place and size is not None
    ]
    return Form(along(source, pairs))


def _index_select(node: Node) -> Form | None:
    source, dim = node.args[0], arguments(node).get("dim")
    if not isinstance(source, Node) or not isinstance(dim, int) or node.args[2] is source:
        return None
    fixed = sizes(source)
    dim %= len(fixed)
    return Form(along(source, [(d, d) for d, size in enumerate(fixed) if d != dim and size is not None]))


def _embedding(node: Node) -> Form | None:
    """weight[ids]"""
    weight = node.args[0]
    assert isinstance(weight, Node)
    return Form((Tie(weight, (1,), (len(sizes(node)) - 1,)),))


RULES = {"aten::index": _index, "aten::index_select": _index_select, "aten::embedding": _embedding}
