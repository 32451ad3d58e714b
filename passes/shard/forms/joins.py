"""Joins: several operands in one; whole in the dimension in which they are joined."""

from __future__ import annotations

from torch.fx import Node

from kvcompile.passes.dependence.context import arguments, nodes_in
from kvcompile.passes.shard.form import Form, sizes
from kvcompile.passes.shard.ties import along


def _cat(node: Node) -> Form | None:
    dim = arguments(node).get("dim", 0)
    result = sizes(node)
    if not isinstance(dim, int):
        return None
    dim %= len(result)
    operands = dict.fromkeys(nodes_in(node.args[0]))
    if any(len(sizes(each)) != len(result) for each in operands):
        return None
    pairs = [(d, d) for d, size in enumerate(result) if d != dim and size is not None]
    return Form(tuple(tie for each in operands for tie in along(each, pairs)))


def _stack(node: Node) -> Form | None:
    dim = arguments(node).get("dim", 0)
    result = sizes(node)
    if not isinstance(dim, int):
        return None
    dim %= len(result)
    pairs = [(d - (d > dim), d) for d, size in enumerate(result) if d != dim and size is not None]
    return Form(tuple(tie for each in dict.fromkeys(nodes_in(node.args[0])) for tie in along(each, pairs)))


RULES = {"aten::cat": _cat, "aten::concat": _cat, "aten::stack": _stack}
