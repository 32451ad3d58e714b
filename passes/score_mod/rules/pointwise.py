"""Pointwise operators: the element of the result from the elements of the operands, in the dtype that PyTorch uses.

Scores are computed in float32 whatever the model's dtype, as attention kernels do: casts and half precision around a
score are dropped. What does not depend on a score keeps its dtype at every step, and so its rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from kvcompile.expression import Expr, const, walk
from kvcompile.passes.graph import value
from kvcompile.passes.score_mod.leaves import Untranslatable
from kvcompile.passes.score_mod.make import cast, make, not_, or_, where
from kvcompile.passes.score_mod.translate import Places, Rule, Translator

_HALVES = (torch.float16, torch.bfloat16)
_WIDE = {"score", "reduction"}
_FEW = 64  # elements that are compared one by one


def _common(node: Node, *arguments: object) -> torch.dtype:
    """The dtype that an operator computes in."""
    known: list[Any] = [value(a) if isinstance(a, Node) else a for a in arguments]
    dtype = torch.result_type(known[0], known[1]) if len(known) == 2 else value(node).dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def settled(e: Expr, dtype: torch.dtype) -> Expr:
    """An operand in the dtype of its operator: of a score, float32 stands for the halves."""
    if e.names & _WIDE and dtype in _HALVES:
        dtype = torch.float32
    return cast(e, dtype)


def _together(args: list[Expr], dtype: torch.dtype) -> tuple[list[Expr], torch.dtype]:
    if dtype in _HALVES and any(arg.names & _WIDE for arg in args):
        dtype = torch.float32
    # A literal beside a half is not rounded to it: PyTorch computes with it in float32.
    literal = [arg.is_const and arg.is_float and dtype.is_floating_point for arg in args]
    return [
        const(arg.value, dtype) if plain else cast(arg, dtype)
        for arg, plain in zip(args, literal, strict=True)
    ], dtype


def _pair(t: Translator, node: Node, places: Places) -> tuple[Expr, Expr, torch.dtype]:
    left, right = node.args[:2]
    dtype = _common(node, left, right)
    args = [t.operand(node, a, places, dtype) for a in (left, right)]
    (a, b), dtype = _together(args, dtype)
    return a, b, dtype


def binary(op: str, swapped: bool = False) -> Rule:
    def rule(t: Translator, node: Node, places: Places) -> Expr:
        a, b, dtype = _pair(t, node, places)
        result = value(node).dtype
        if result != dtype and not (result in _HALVES and dtype == torch.float32):
            (a, b), dtype = _together([a, b], result)
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            b = make("mul", dtype, b, const(alpha, dtype))  # type: ignore[arg-type]
        return make(op, dtype, b, a) if swapped else make(op, dtype, a, b)

    return rule


def _compare(op: str, swapped: bool = False, negated: bool = False) -> Rule:
    def rule(t: Translator, node: Node, places: Places) -> Expr:
        a, b, dtype = _pair(t, node, places)
        if dtype is torch.bool and op != "eq":
            a, b = cast(a, torch.int64), cast(b, torch.int64)
        found = make(op, torch.bool, b, a) if swapped else make(op, torch.bool, a, b)
        return t.decided(not_(found) if negated else found)

    return rule


def _unary(op: str) -> Rule:
    def rule(t: Translator, node: Node, places: Places) -> Expr:
        if len(node.args) != 1 or node.kwargs:
            raise Untranslatable(f"no translation of {node.target} with options", node)
        dtype = value(node).dtype
        (x,), dtype = _together([t.operand(node, node.args[0], places, dtype)], dtype)
        return make(op, dtype, x)

    return rule


def _same(t: Translator, node: Node, places: Places) -> Expr:
    source = node.args[0]
    assert isinstance(source, Node)
    return t.element(source, t.broadcast(source, places))


def _cast(t: Translator, node: Node, places: Places) -> Expr:
    found, dtype = _same(t, node, places), value(node).dtype
    if dtype.is_floating_point and dtype.itemsize == 1 and "score" in found.names:
        # What float16 rounds is dropped, as attention kernels drop it; eight bits are a choice of the model.
        raise Untranslatable(f"a score is rounded to {str(dtype).removeprefix('torch.')}", node)
    return settled(found, dtype)


def _logical(op: str) -> Rule:
    def rule(t: Translator, node: Node, places: Places) -> Expr:
        a, b = (cast(t.operand(node, x, places, torch.bool), torch.bool) for x in node.args[:2])
        return t.decided(make(op, torch.bool, a, b))

    return rule


def _bitwise(op: str) -> Rule:
    logical = _logical(op)

    def rule(t: Translator, node: Node, places: Places) -> Expr:
        if value(node).dtype is torch.bool:
            return logical(t, node, places)
        a, b, dtype = _pair(t, node, places)
        return make(op, dtype, a, b)

    return rule


def _not(t: Translator, node: Node, places: Places) -> Expr:
    x = _same(t, node, places)
    if value(node).dtype is torch.bool:
        return not_(cast(x, torch.bool))
    return make("bitnot", value(node).dtype, x)


def _where(t: Translator, node: Node, places: Places) -> Expr:
    condition, yes, no = node.args[:3]
    assert isinstance(condition, Node)
    claim = t.decided(cast(t.element(condition, t.broadcast(condition, places)), torch.bool))
    dtype = value(node).dtype
    # Only the branch that is taken has to be translated.
    if claim.is_const:
        return settled(t.operand(node, yes if claim.value else no, places, dtype), dtype)
    (a, b), _ = _together([t.operand(node, x, places, dtype) for x in (yes, no)], dtype)
    return where(claim, a, b)


def _masked_fill(t: Translator, node: Node, places: Places) -> Expr:
    source, mask, fill = node.args[:3]
    assert isinstance(mask, Node)
    claim = t.decided(cast(t.element(mask, t.broadcast(mask, places)), torch.bool))
    dtype = value(node).dtype
    if claim.is_const:
        return settled(t.operand(node, fill if claim.value else source, places, dtype), dtype)
    (a, b), _ = _together([t.operand(node, x, places, dtype) for x in (fill, source)], dtype)
    return where(claim, a, b)


def _argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _clamp(t: Translator, node: Node, places: Places) -> Expr:
    dtype = value(node).dtype
    low, high = _argument(node, 1, "min"), _argument(node, 2, "max")
    args = [t.operand(node, x, places, dtype) for x in (node.args[0], low, high) if x is not None]
    (x, *bounds), dtype = _together(args, dtype)
    if low is not None:
        x = make("max", dtype, x, bounds.pop(0))
    return x if high is None else make("min", dtype, x, bounds.pop(0))


def _clamp_one(op: str) -> Rule:
    def rule(t: Translator, node: Node, places: Places) -> Expr:
        dtype = value(node).dtype
        (x, bound), dtype = _together([t.operand(node, a, places, dtype) for a in node.args[:2]], dtype)
        return make(op, dtype, x, bound)

    return rule


def _relu(t: Translator, node: Node, places: Places) -> Expr:
    x = _same(t, node, places)
    return make("max", x.dtype, x, const(0, x.dtype))


def _leaky_relu(t: Translator, node: Node, places: Places) -> Expr:
    x = _same(t, node, places)
    slope = t.number(_argument(node, 1, "negative_slope", 0.01), x.dtype)
    return where(make("gt", torch.bool, x, const(0, x.dtype)), x, make("mul", x.dtype, x, slope))


def _isin(t: Translator, node: Node, places: Places) -> Expr:
    """Whether an element is one of a few known ones."""
    source, among = node.args[:2]
    assert isinstance(source, Node) and isinstance(among, Node)
    if not t.tables.has(among) or t.tables.trained(among) or node.kwargs.get("invert"):
        raise Untranslatable(f"no translation of {node.target}", node)
    x, known = t.element(source, places), t.tables.value(among).reshape(-1)
    if len(known) > _FEW:
        raise Untranslatable(f"{node.target} of {len(known)} elements", node)
    dtype = torch.result_type(value(source), value(among))
    claims = [make("eq", torch.bool, cast(x, dtype), const(number, dtype)) for number in known.tolist()]
    return or_(*claims)


def _square(t: Translator, node: Node, places: Places) -> Expr:
    x = _same(t, node, places)
    return make("mul", x.dtype, x, x)


def _outer(t: Translator, node: Node, places: Places) -> Expr:
    left, right = node.args[:2]
    assert isinstance(left, Node) and isinstance(right, Node)
    dtype = value(node).dtype
    (a, b), dtype = _together([t.element(left, places[:1]), t.element(right, places[1:])], dtype)
    return make("mul", dtype, a, b)


def _divide(t: Translator, node: Node, places: Places) -> Expr:
    mode = node.kwargs.get("rounding_mode")
    result = value(node).dtype
    if mode is None:
        args = [t.operand(node, a, places, result) for a in node.args[:2]]
        (a, b), dtype = _together(args, result)
        return make("div", dtype, a, b)
    a, b, dtype = _pair(t, node, places)
    if dtype.is_floating_point:
        return make("floor" if mode == "floor" else "trunc", dtype, make("div", dtype, a, b))
    return make("floordiv" if mode == "floor" else "truncdiv", dtype, a, b)


def _floor_divide(t: Translator, node: Node, places: Places) -> Expr:
    a, b, dtype = _pair(t, node, places)
    return make("floordiv", dtype, a, b)


def _power(t: Translator, node: Node, places: Places) -> Expr:
    a, b, dtype = _pair(t, node, places)
    result = value(node).dtype
    (a, b), dtype = _together([a, b], result)
    if b.is_const and b.value in (1, 2):
        return a if b.value == 1 else make("mul", dtype, a, a)
    return make("pow", dtype, a, b)


def _nan_to_num(t: Translator, node: Node, places: Places) -> Expr:
    """A probability is no number only where a query sees no key: that those rows are 0 is said of the site.

    A product of numbers is one, so of raw scores it changes nothing (differential attention); attention kernels compute
    them in float32, where they do not overflow as those of half precision may.
    """
    x = _same(t, node, places)
    if all(part.op in ("score", "mul", "div", "cast") or _is_number(part) for part in walk(x)):
        return x
    if "reduction" not in x.names:
        raise Untranslatable(f"no translation of {node.target}", node)
    return Expr("nan_to_num", x.dtype, (x,))


def _is_number(e: Expr) -> bool:
    return e.is_const and math.isfinite(e.value)


_UNARY = (
    "neg",
    "abs",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "sin",
    "cos",
    "atan",
    "erf",
    "floor",
    "ceil",
    "trunc",
    "round",
    "sign",
    "silu",
    "reciprocal",
)

RULES: dict[str, Rule] = {
    **{name: _unary(name) for name in _UNARY},
    **dict.fromkeys(
        ("contiguous", "clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "dropout"), _same
    ),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _cast),
    "add": binary("add"),
    "sub": binary("sub"),
    "rsub": binary("sub", swapped=True),
    "mul": binary("mul"),
    "multiply": binary("mul"),
    "minimum": binary("min"),
    "maximum": binary("max"),
    "eq": _compare("eq"),
    "ne": _compare("eq", negated=True),
    "ge": _compare("ge"),
    "gt": _compare("gt"),
    "le": _compare("ge", swapped=True),
    "lt": _compare("gt", swapped=True),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": lambda t, node, places: not_(cast(_same(t, node, places), torch.bool)),
    "bitwise_not": _not,
    **{name: _bitwise("and") for name in ("__and__", "bitwise_and")},
    **{name: _bitwise("or") for name in ("__or__", "bitwise_or")},
    **{name: _bitwise("xor") for name in ("__xor__", "bitwise_xor")},
    **{name: binary("shr") for name in ("__rshift__", "bitwise_right_shift")},
    **{name: binary("shl") for name in ("__lshift__", "bitwise_left_shift")},
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp_one("max"),
    "clamp_max": _clamp_one("min"),
    "relu": _relu,
    "square": _square,
    "leaky_relu": _leaky_relu,
    "isin": _isin,
    "hardtanh": _clamp,
    "outer": _outer,
    "div": _divide,
    "divide": _divide,
    "true_divide": _divide,
    "floor_divide": _floor_divide,
    "remainder": binary("mod"),
    "pow": _power,
    "nan_to_num": _nan_to_num,
}
