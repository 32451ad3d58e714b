"""Views: the same elements at other places."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from kvcompile.expression import Expr, integer
from kvcompile.passes.graph import expr, shape, target_name
from kvcompile.passes.score_mod.leaves import Untranslatable
from kvcompile.passes.score_mod.make import add, make, sub
from kvcompile.passes.score_mod.translate import Places, Rule, Translator, is_one


def _source(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _dim(node: Node, place: int = 1, rank: int | None = None, default: int = 0) -> int:
    found = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
    assert isinstance(found, int)
    return found % (len(shape(_source(node))) if rank is None else rank)


def _reshape(t: Translator, node: Node, places: Places) -> Expr:
    """Dimensions in groups of equal size: each group is one number, joined from the result's places, taken apart."""
    source = _source(node)
    before, after = ([expr(s) for s in shape(n)] for n in (source, node))
    found: list[Expr] = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins: list[Any] = []
        outs: list[tuple[Any, Expr]] = []
        left, right = sympy.Integer(1), sympy.Integer(1)
        while True:
            if ins and outs and left == right:
                break
            if i < len(before) and (not ins or not _covers(left, right)):
                left, ins, i = left * before[i], [*ins, before[i]], i + 1
            elif j < len(after):
                right, outs, j = right * after[j], [*outs, (after[j], places[j])], j + 1
            elif i < len(before):
                left, ins, i = left * before[i], [*ins, before[i]], i + 1
            else:
                break
        if left != right:
            raise Untranslatable(f"{node.target} of {tuple(before)} to {tuple(after)}", node)
        found += _regrouped(t, node, ins, outs)
    return t.element(source, tuple(found))


def _covers(left: Any, right: Any) -> bool:
    """Whether the source's part of a group is the larger: the result has to catch up."""
    if left == right:
        return False
    ratio = sympy.simplify(left / right)
    return not (ratio.is_Rational and ratio < 1) and bool(
        ratio.is_Rational or left.free_symbols - right.free_symbols
    )


def _regrouped(t: Translator, node: Node, ins: list[Any], outs: list[tuple[Any, Expr]]) -> list[Expr]:
    outs = [(size, place) for size, place in outs if size != 1]
    real = [size for size in ins if size != 1]
    if [size for size, _ in outs] == real:
        places = iter([place for _, place in outs])
        return [integer(0) if size == 1 else next(places) for size in ins]
    flat = integer(0)
    for size, place in outs:
        flat = t.joined(flat, place, t.size(size))
    found: list[Expr] = []
    for size in reversed(real[1:]):
        flat, last = t.split(flat, t.size(size), node)
        found.append(last)
    found = [flat, *reversed(found)] if real else []
    places = iter(found)
    return [integer(0) if size == 1 else next(places) for size in ins]


def _permute(t: Translator, node: Node, places: Places) -> Expr:
    source, rank = _source(node), len(places)
    order = node.args[1]
    assert isinstance(order, (list, tuple))
    found = list(places)
    for place, dim in enumerate(order):
        assert isinstance(dim, int)
        found[dim % rank] = places[place]
    return t.element(source, tuple(found))


def _transpose(t: Translator, node: Node, places: Places) -> Expr:
    rank = len(places)
    a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
    found = list(places)
    found[a], found[b] = places[b], places[a]
    return t.element(_source(node), tuple(found))


def _movedim(t: Translator, node: Node, places: Places) -> Expr:
    rank = len(places)
    given = [list(d) if isinstance(d, (list, tuple)) else [d] for d in node.args[1:3]]
    source, target = ([int(d) % rank for d in dims] for dims in given)  # type: ignore[arg-type]
    rest = iter(dim for dim in range(rank) if dim not in source)
    order = [source[target.index(place)] if place in target else next(rest) for place in range(rank)]
    found = list(places)
    for place, dim in enumerate(order):
        found[dim] = places[place]
    return t.element(_source(node), tuple(found))


def _last_two(t: Translator, node: Node, places: Places) -> Expr:
    found = places if len(places) < 2 else (*places[:-2], places[-1], places[-2])
    return t.element(_source(node), found)


def _unsqueeze(t: Translator, node: Node, places: Places) -> Expr:
    dim = _dim(node, rank=len(places))
    return t.element(_source(node), places[:dim] + places[dim + 1 :])


def _squeeze(t: Translator, node: Node, places: Places) -> Expr:
    source = _source(node)
    sizes = shape(source)
    gone: set[int]
    if len(node.args) > 1:
        dims = node.args[1]
        chosen = dims if isinstance(dims, (list, tuple)) else [dims]
        gone = {int(d) % len(sizes) for d in chosen if is_one(sizes[int(d)])}  # type: ignore[arg-type]
    else:
        gone = {dim for dim, size in enumerate(sizes) if is_one(size)}
    rest = iter(places)
    return t.element(source, tuple(integer(0) if dim in gone else next(rest) for dim in range(len(sizes))))


def _expand(t: Translator, node: Node, places: Places) -> Expr:
    source = _source(node)
    return t.element(source, t.broadcast(source, places))


def _select(t: Translator, node: Node, places: Places) -> Expr:
    source, dim = _source(node), _dim(node)
    place = t.from_end(node, source, dim, node.args[2])
    return t.element(source, (*places[:dim], place, *places[dim:]))


def _slice(t: Translator, node: Node, places: Places) -> Expr:
    source, dim = _source(node), _dim(node)
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    step = node.args[4] if len(node.args) > 4 else 1
    assert isinstance(step, int)
    first = t.from_end(node, source, dim, start)
    if not (first.is_const and first.value >= 0):
        first = make("max", torch.int64, first, integer(0))  # a slice from before the beginning begins there
        if t.same(first.args[0] if first.op == "max" else first, first):
            first = first.args[0] if first.op == "max" else first
    place = add(make("mul", torch.int64, places[dim], integer(step)), first)
    return t.element(source, (*places[:dim], place, *places[dim + 1 :]))


def _narrow(t: Translator, node: Node, places: Places) -> Expr:
    source, dim = _source(node), _dim(node)
    first = t.from_end(node, source, dim, node.args[2])
    return t.element(source, (*places[:dim], add(places[dim], first), *places[dim + 1 :]))


def _repeat(t: Translator, node: Node, places: Places) -> Expr:
    source = _source(node)
    sizes = shape(source)
    found = []
    for size, place in zip(sizes, places[len(places) - len(sizes) :], strict=True):
        if is_one(size):
            found.append(integer(0))
            continue
        whole = t.number(size, torch.int64)
        found.append(t.split(place, whole, node)[1] if whole.is_const else _within(t, node, place, whole))
    return t.element(source, tuple(found))


def _within(t: Translator, node: Node, place: Expr, size: Expr) -> Expr:
    from kvcompile.passes.score_mod.make import lt

    if place.op == "flat" and place.args[-1] is size:
        return place.args[1]
    if t.prover.holds(lt(place, size)):
        return place
    raise Untranslatable(f"{node.target} of a dimension that grows", node)


def _repeat_interleave(t: Translator, node: Node, places: Places) -> Expr:
    source, times = _source(node), node.args[1]
    if not isinstance(times, int) or len(node.args) < 3:
        raise Untranslatable(f"no translation of {node.target}", node)
    dim = _dim(node, 2)
    first, _ = t.split(places[dim], integer(times), node)
    return t.element(source, (*places[:dim], first, *places[dim + 1 :]))


def _flip(t: Translator, node: Node, places: Places) -> Expr:
    source, dims = _source(node), node.args[1]
    assert isinstance(dims, (list, tuple))
    found = list(places)
    for dim in dims:
        assert isinstance(dim, int)
        dim %= len(places)
        found[dim] = sub(add(t.number(shape(source)[dim], torch.int64), integer(-1)), places[dim])
    return t.element(source, tuple(found))


def _getitem(t: Translator, node: Node, places: Places) -> Expr:
    """One of several results."""
    source, number = node.args[0], node.args[1]
    assert isinstance(source, Node) and isinstance(number, int)
    name = target_name(source)
    if name in ("split", "chunk", "split_with_sizes", "unbind", "tensor_split"):
        whole = _source(source)
        position = 1 if name == "unbind" else 2
        dim = _dim(source, position)
        if name == "unbind":
            return t.element(whole, (*places[:dim], integer(number), *places[dim:]))
        pieces = source.meta["val"]
        start = integer(0)
        for piece in pieces[:number]:
            start = add(start, t.number(piece.shape[dim], torch.int64))
        return t.element(whole, (*places[:dim], add(places[dim], start), *places[dim + 1 :]))
    if name == "meshgrid":
        sources = source.args[0]
        assert isinstance(sources, (list, tuple))
        dims = list(range(len(sources)))
        if source.kwargs.get("indexing") == "xy" or (len(source.args) > 1 and source.args[1] == "xy"):
            dims[:2] = [1, 0]
        chosen = sources[number]
        assert isinstance(chosen, Node)
        return t.element(chosen, (places[dims[number]],) if shape(chosen) else ())
    if name in ("max", "min") and number == 0:
        from kvcompile.passes.score_mod.rules.reductions import reduced

        return reduced(t, source, places, "max" if name == "max" else "min", shape(node))
    raise Untranslatable(f"no translation of {source.target}", source)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"), _reshape
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "permute": _permute,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("movedim", "moveaxis"), _movedim),
    "t": _last_two,
    "mT": _last_two,
    "numpy_T": lambda t, node, places: t.element(_source(node), places[::-1]),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    "slice": _slice,
    "narrow": _narrow,
    "repeat": _repeat,
    "tile": _repeat,
    "repeat_interleave": _repeat_interleave,
    "flip": _flip,
    "getitem": _getitem,
}
