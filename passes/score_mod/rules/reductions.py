"""Reductions, cumulative sums and softmax: over all keys as a bound variable, over a few fixed places one by one."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch.fx import Node

from kvcompile.expression import Expr, K, N, const, integer
from kvcompile.passes.graph import shape, value
from kvcompile.passes.score_mod.leaves import Untranslatable
from kvcompile.passes.score_mod.make import add, and_, cast, linear, make, or_
from kvcompile.passes.score_mod.rules.pointwise import binary, settled
from kvcompile.passes.score_mod.translate import Places, Rule, Translator

_MOST = 64  # places that are written out one by one


def _dims(node: Node, place: int = 1) -> list[int]:
    source = node.args[0]
    assert isinstance(source, Node)
    rank = len(shape(source))
    dims: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    return [int(d) % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def reduced(t: Translator, node: Node, places: Places, kind: str, result: tuple[Any, ...]) -> Expr:
    """The reduction of a node's first operand; `result`: the shape of what it gives."""
    source = node.args[0]
    assert isinstance(source, Node)
    dims, sizes = _dims(node), shape(source)
    rest = list(places)
    if len(result) == len(sizes):  # keepdim
        rest = [place for dim, place in enumerate(places) if dim not in dims]
    grows = [dim for dim in dims if not t.number(sizes[dim], torch.int64).is_const]
    if grows:
        if len(dims) != 1 or any("k" in place.names for place in rest):
            raise Untranslatable(f"{node.target} over the tokens", node)
        if t.number(sizes[dims[0]], torch.int64) is not N and kind not in ("max",):
            raise Untranslatable(f"{node.target} over {sizes[dims[0]]} places", node)
        inner = [*rest[: dims[0]], K, *rest[dims[0] :]]
        body = settled(
            t.element(source, tuple(inner)), value(node).dtype if kind == "sum" else value(source).dtype
        )
        if "score" not in body.names:
            raise Untranslatable(f"{node.target} over the tokens", node)
        return Expr(f"reduce_{kind}", body.dtype, (body,))
    counts = [int(t.number(sizes[dim], torch.int64).value) for dim in dims]
    total = 1
    for count in counts:
        total *= count
    if total > _MOST:
        raise Untranslatable(f"{node.target} over {total} places", node)
    found: Expr | None = None
    for chosen in product(*map(range, counts)):
        own = list(rest)
        for dim, number in sorted(zip(dims, chosen, strict=True)):
            own.insert(dim, integer(number))
        x = t.element(source, tuple(own))
        found = x if found is None else _joined(kind, found, x, node)
    assert found is not None, "a dimension has a size"
    return found


def _joined(kind: str, a: Expr, b: Expr, node: Node) -> Expr:
    if kind in ("any", "all"):
        a, b = cast(a, torch.bool), cast(b, torch.bool)
        return or_(a, b) if kind == "any" else and_(a, b)
    if kind == "sum":
        a, b = (settled(x, value(node).dtype) for x in (a, b))
        return make("add", a.dtype, a, b)
    if kind in ("max", "min"):
        return make(kind, a.dtype, a, b)
    raise Untranslatable(f"no translation of {node.target}", node)


def _reduce(kind: str) -> Rule:
    pointwise = binary(kind)

    def rule(t: Translator, node: Node, places: Places) -> Expr:
        if len(node.args) > 1 and isinstance(node.args[1], Node):  # the larger of two tensors
            return pointwise(t, node, places)
        return reduced(t, node, places, kind, shape(node))

    return rule


def _cumsum(t: Translator, node: Node, places: Places) -> Expr:
    """Of the same number everywhere: that number times how many; of anything else only what a token carries."""
    source, dim = node.args[0], node.args[1]
    assert isinstance(source, Node) and isinstance(dim, int)
    dim %= len(places)
    body = t.element(source, (*places[:dim], K, *places[dim + 1 :]))
    if not body.is_const:
        raise Untranslatable(f"{node.target} of what differs from token to token", node)
    dtype = value(node).dtype
    count = cast(add(places[dim], integer(1)), dtype)
    return make("mul", dtype, count, cast(body, dtype))


def _softmax(op: str) -> Rule:
    def rule(t: Translator, node: Node, places: Places) -> Expr:
        """Over the keys, and perhaps one more column before or after them (a sink)."""
        source, dim = node.args[0], node.args[1]
        assert isinstance(source, Node) and isinstance(dim, int)
        dim %= len(places)
        size = t.number(shape(source)[dim], torch.int64)
        shift, factors = linear(places[dim])
        extra, grows = linear(size)
        if grows != {N: 1} or factors != {K: 1} or extra not in (0, 1) or not 0 <= shift <= extra:
            raise Untranslatable(f"{node.target} over {shape(source)[dim]} columns", node)
        if any("k" in place.names for i, place in enumerate(places) if i != dim):
            raise Untranslatable(f"{node.target} over the queries", node)

        def column(place: Expr) -> Expr:
            return settled(t.element(source, (*places[:dim], place, *places[dim + 1 :])), torch.float32)

        sinks = [] if not extra else [column(integer(0) if shift else N)]
        body = column(places[dim])
        if "score" not in body.names:
            raise Untranslatable(f"{node.target} over the keys", node)
        return Expr(op, torch.float32, (body, *sinks))

    return rule


def _mean(t: Translator, node: Node, places: Places) -> Expr:
    source = node.args[0]
    assert isinstance(source, Node)
    count = 1
    for dim in _dims(node):
        size = t.number(shape(source)[dim], torch.int64)
        if not size.is_const:
            raise Untranslatable(f"{node.target} over the tokens", node)
        count *= size.value
    total = reduced(t, node, places, "sum", shape(node))
    return make("div", total.dtype, total, const(count, total.dtype))


RULES: dict[str, Rule] = {
    "sum": _reduce("sum"),
    "amax": _reduce("max"),
    "amin": _reduce("min"),
    "max": _reduce("max"),
    "min": _reduce("min"),
    "any": _reduce("any"),
    "all": _reduce("all"),
    "logsumexp": _reduce("lse"),
    "mean": _mean,
    "cumsum": _cumsum,
    "softmax": _softmax("softmax"),
    "_softmax": _softmax("softmax"),
    "_safe_softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "_log_softmax": _softmax("log_softmax"),
}
