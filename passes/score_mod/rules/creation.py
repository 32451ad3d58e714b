"""Tensors that are made: positions, constants, triangles."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.expression import FALSE, TRUE, Expr, const
from kvcompile.passes.graph import value
from kvcompile.passes.score_mod.leaves import Untranslatable
from kvcompile.passes.score_mod.make import add, cast, equal, le, make, sub, where
from kvcompile.passes.score_mod.translate import Places, Rule, Translator


def _arange(t: Translator, node: Node, places: Places) -> Expr:
    numbers = [t.number(a) for a in node.args]
    start, step = const(0, torch.int64), const(1, torch.int64)
    if len(numbers) >= 2:
        start = numbers[0]
    if len(numbers) >= 3:
        step = numbers[2]
    dtype = value(node).dtype
    if not all(x.is_int for x in (start, step)):
        if not (start.is_const and step.is_const):
            raise Untranslatable("an arange from a number that depends on the length", node)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        place = cast(places[0], wide)
        found = make("add", wide, const(start.value, wide), make("mul", wide, place, const(step.value, wide)))
        return cast(found, dtype)
    return cast(add(start, make("mul", torch.int64, places[0], step)), dtype)


def _full(t: Translator, node: Node, places: Places) -> Expr:
    name = node.target._schema.name.split("::")[-1]  # type: ignore[union-attr]
    dtype = value(node).dtype
    if "zeros" in name or "empty" in name:
        return const(0, dtype)
    if "ones" in name:
        return const(1, dtype)
    fill = node.args[0] if name == "scalar_tensor" else node.args[2] if name == "new_full" else node.args[1]
    return cast(t.number(fill), dtype)


def _triangle(upper: bool) -> Rule:
    def rule(t: Translator, node: Node, places: Places) -> Expr:
        source = node.args[0]
        assert isinstance(source, Node)
        diagonal = t.number(node.args[1] if len(node.args) > 1 else 0, torch.int64)
        distance = sub(places[-1], places[-2])
        claim = t.decided(le(diagonal, distance) if upper else le(distance, diagonal))
        zero = const(0, value(node).dtype)
        if claim is FALSE:
            return zero
        inside = t.element(source, places)
        return inside if claim is TRUE else where(claim, inside, cast(zero, inside.dtype))

    return rule


def _eye(t: Translator, node: Node, places: Places) -> Expr:
    return cast(equal(places[0], places[1]), value(node).dtype)


RULES: dict[str, Rule] = {
    "arange": _arange,
    **dict.fromkeys(
        (
            "zeros",
            "ones",
            "full",
            "zeros_like",
            "ones_like",
            "full_like",
            "new_zeros",
            "new_ones",
            "new_full",
            "scalar_tensor",
            "fill",
        ),
        _full,
    ),
    "tril": _triangle(upper=False),
    "triu": _triangle(upper=True),
    "eye": _eye,
}
