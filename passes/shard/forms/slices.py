"""Slices: some of an operand's indices along one dimension."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from kvcompile.passes.dependence.context import arguments
from kvcompile.passes.shard.form import Form, Where, sizes
from kvcompile.passes.shard.ties import Slice, Tie, along, strided


def _slice(node: Node) -> Form | None:
    """slice(x, dim, start, end, step), with numbers for all of them, or whole in that dimension."""
    source, given = node.args[0], arguments(node)
    assert isinstance(source, Node)
    fixed, result = sizes(source), sizes(node)
    dim = given.get("dim", 0)
    if not isinstance(dim, int):
        return None
    dim %= len(fixed)
    ties = along(source, [(d, d) for d, size in enumerate(fixed) if d != dim and size is not None])
    size, count = fixed[dim], result[dim]
    start, step = given.get("start"), given.get("step", 1)
    start = 0 if start is None else start
    if size is None or count is None or not isinstance(start, int) or not isinstance(step, int) or not count:
        return Form(ties)
    first = min(max(start + size if start < 0 else start, 0), size)
    how = Slice(size, first, step, count)

    def rewrite(where: Where, args: list[Any], kwargs: dict[str, Any]) -> None:
        """The places of the rank's own indices."""
        cut = where.operands[source][dim]
        if cut is None:
            return
        found = strided(how.places(cut.indices(where.rank))[0])
        assert found is not None, "forward says whether a slice gives them"
        args[1:] = [dim, *found]
        kwargs.clear()

    return Form((*ties, Tie(source, (dim,), (dim,), how)), rewrite=rewrite)


def _select(node: Node) -> Form | None:
    """select(x, dim, index): the dimension goes."""
    source, given = node.args[0], arguments(node)
    dim = given.get("dim")
    if not isinstance(source, Node) or not isinstance(dim, int):
        return None
    fixed = sizes(source)
    dim %= len(fixed)
    pairs = [(d, d - (d > dim)) for d, size in enumerate(fixed) if d != dim and size is not None]
    return Form(along(source, pairs))


RULES = {"aten::slice": _slice, "aten::select": _select}
