"""Joins: an element comes from one of several tensors, or from what stands around one, by its place."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.expression import FALSE, TRUE, Expr, const, integer
from kvcompile.passes.graph import shape, value
from kvcompile.passes.score_mod.leaves import Untranslatable
from kvcompile.passes.score_mod.make import add, and_, cast, le, lt, sub, where
from kvcompile.passes.score_mod.rules.pointwise import settled
from kvcompile.passes.score_mod.translate import Places, Rule, Translator


def _cat(t: Translator, node: Node, places: Places) -> Expr:
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(parts, (list, tuple)) and isinstance(dim, int)
    dim %= len(places)
    starts, start = [], integer(0)
    for part in parts:
        assert isinstance(part, Node)
        starts.append(start)
        start = add(start, t.number(shape(part)[dim], torch.int64))
    found: Expr | None = None
    for part, begin in zip(reversed(parts), reversed(starts), strict=True):
        assert isinstance(part, Node)
        end = add(begin, t.number(shape(part)[dim], torch.int64))
        inside = and_(t.decided(le(begin, places[dim])), t.decided(lt(places[dim], end)))
        if inside is FALSE:
            continue
        own = t.element(part, (*places[:dim], sub(places[dim], begin), *places[dim + 1 :]))
        own = settled(own, value(node).dtype)
        if inside is TRUE:
            return own
        found = own if found is None else _either(inside, own, found)
    assert found is not None, "a place is in one of the parts"
    return found


def _either(claim: Expr, yes: Expr, no: Expr) -> Expr:
    if yes.dtype is not no.dtype:  # a score, in float32, beside what has the model's dtype
        yes, no = cast(yes, torch.float32), cast(no, torch.float32)
    return where(claim, yes, no)


def _stack(t: Translator, node: Node, places: Places) -> Expr:
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(parts, (list, tuple)) and isinstance(dim, int)
    dim %= len(places)
    rest = places[:dim] + places[dim + 1 :]
    found: Expr | None = None
    for number, part in enumerate(parts):
        claim = t.decided(_is(places[dim], number))
        if claim is FALSE:
            continue
        assert isinstance(part, Node)
        own = settled(t.element(part, rest), value(node).dtype)
        if claim is TRUE:
            return own
        found = own if found is None else _either(claim, own, found)
    assert found is not None, "a place is in one of the parts"
    return found


def _is(place: Expr, number: int) -> Expr:
    from kvcompile.passes.score_mod.make import equal

    return equal(place, integer(number))


def _pad(t: Translator, node: Node, places: Places) -> Expr:
    source, amounts = node.args[0], node.args[1]
    assert isinstance(source, Node) and isinstance(amounts, (list, tuple))
    name = node.target._schema.name  # type: ignore[union-attr]
    if not name.endswith("constant_pad_nd") and len(node.args) > 2 and node.args[2] != "constant":
        raise Untranslatable(f"no translation of {node.target} that repeats or reflects", node)
    last = node.args[-1] if len(node.args) > (2 if name.endswith("constant_pad_nd") else 3) else 0
    dtype = value(node).dtype
    fill = const(0, dtype) if last is None else cast(t.number(last), dtype)
    found, inside = list(places), TRUE
    for pair in range(len(amounts) // 2):
        dim = len(places) - 1 - pair
        before = t.number(amounts[2 * pair], torch.int64)
        found[dim] = sub(places[dim], before)
        size = t.number(shape(source)[dim], torch.int64)
        inside = and_(inside, t.decided(le(integer(0), found[dim])), t.decided(lt(found[dim], size)))
    if inside is FALSE:
        return fill
    own = settled(t.element(source, tuple(found)), dtype)
    return own if inside is TRUE else _either(inside, own, fill)


def _roll(t: Translator, node: Node, places: Places) -> Expr:
    source, shifts = node.args[0], node.args[1]
    dims = node.args[2] if len(node.args) > 2 else []
    assert isinstance(source, Node) and isinstance(shifts, (list, tuple)) and isinstance(dims, (list, tuple))
    if len(shifts) != len(dims):
        raise Untranslatable(f"no translation of {node.target} over all dimensions", node)
    found = list(places)
    for shift, dim in zip(shifts, dims, strict=True):
        assert isinstance(dim, int)
        dim %= len(places)
        place = sub(found[dim], t.number(shift, torch.int64))
        size = t.number(shape(source)[dim], torch.int64)
        if not size.is_const:
            raise Untranslatable(f"{node.target} along a dimension that grows", node)
        found[dim] = t.split(place, size, node)[1]
    return t.element(source, tuple(found))


RULES: dict[str, Rule] = {
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "pad": _pad,
    "constant_pad_nd": _pad,
    "roll": _roll,
}
