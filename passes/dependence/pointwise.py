"""Pointwise operators: each element of the result is made of the elements at the same place.

    add, mul, where, masked_fill, casts, .. [.., a, b] with [.., a or 1, b or 1]

Dimensions that line up must have the same factors: tokens with tokens, rows with rows. A length of the sequence as an
operand (`x * x.shape[1]`, max(positions) + 1) makes LENGTH; a comparison of it with a constant is a constant up to the
length at which it turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, is_tensor, rank
from kvcompile.passes.dependence.facts import (
    Choice,
    Dim,
    Fact,
    Kept,
    Level,
    Located,
    N,
    Reason,
    anything,
    joined,
)
from kvcompile.passes.graph import target_name

# Pointwise operators without torch's tag.
NAMES = (
    *("_to_copy", "to", "clone", "contiguous", "type_as", "lift_fresh_copy", "detach", "alias", "_conj"),
    *(
        "masked_fill",
        "where",
        "softplus",
        "relu",
        "relu6",
        "selu",
        "elu",
        "celu",
        "silu",
        "gelu",
        "mish",
        "prelu",
    ),
    *(
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "leaky_relu",
        "log_sigmoid",
        "rrelu",
        "dropout",
        "feature_dropout",
    ),
    *(
        "clamp",
        "clamp_min",
        "clamp_max",
        "clip",
        "resolve_conj",
        "resolve_neg",
        "positive",
        "__and__",
        "__or__",
    ),
    *("__xor__", "__lshift__", "__rshift__", "float_power", "square", "true_divide", "multiply", "subtract"),
    *(
        "divide",
        "negative",
        "absolute",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
        "not_equal",
        "rsub",
    ),
    *(
        "addcmul",
        "addcdiv",
        "lerp",
        "fmod",
        "remainder",
        "floor_divide",
        "isnan",
        "isinf",
        "isfinite",
        "nan_to_num",
    ),
    *(
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "special_expit",
        "special_log1p",
        "threshold",
    ),
    *("real", "imag", "complex", "polar", "angle", "arctan2", "atan2", "maximum", "minimum", "fmax", "fmin"),
    *("copy", "fill", "zero", "floor", "isclose", "hardshrink", "softshrink", "erf", "erfc"),
)
_SAME_VALUES = ("_to_copy", "to", "clone", "contiguous", "type_as", "lift_fresh_copy", "detach", "alias")
_COMPARE: dict[str, Any] = {
    "lt": sympy.Lt,
    "less": sympy.Lt,
    "le": sympy.Le,
    "less_equal": sympy.Le,
    "gt": sympy.Gt,
    "greater": sympy.Gt,
    "ge": sympy.Ge,
    "greater_equal": sympy.Ge,
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "not_equal": sympy.Ne,
}
_COARSE = (torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16)
_FEW = 16  # a limit below so many tokens is none: it tells single tokens from prompts
MOST = 2**31


def pointwise(ctx: Context, node: Node) -> Result:
    """Any pointwise operator over all its tensors."""
    name = target_name(node)
    if name in ("dropout", "feature_dropout", "rrelu") and any(arg is True for arg in node.args):
        return anything(node, "it draws random numbers")
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and name not in NAMES:
        return anything(node, "it draws random numbers")
    if not is_tensor(node):  # where(condition): places of which there are as many as values say
        return anything(node, f"which elements {name} gives depends on values")
    first = node.args[0]
    if name in ("to", "type_as") and isinstance(first, Node):
        return elementwise(ctx, node, [first])  # of the other they take the type alone
    return elementwise(ctx, node, node.all_input_nodes)


def elementwise(ctx: Context, node: Node, operands: Sequence[Node]) -> Fact:
    """The fact of a function of the elements at the same place of all `operands`."""
    tensors = [operand for operand in operands if is_tensor(operand)]
    facts = [ctx.fact(operand) for operand in tensors]
    unusable = next((fact for fact in facts if fact.level == Level.ANYTHING), None)
    knows = _knowledge(ctx, node, facts) if len(facts) == 1 else _filled(ctx, node)
    if unusable is not None:
        if knows is not None:
            return replace(facts[0], knows=knows)
        return as_values(node, unusable)
    dims = aligned([fact.dims for fact in facts], rank(node))
    if dims is None:
        return anything(node, f"it aligns {' with '.join(map(told, facts))}", facts)
    numbers = [ctx.fact(operand) for operand in operands if not is_tensor(operand)]
    found = replace(joined([*facts, *numbers]), dims=dims, knows=knows)
    if found.level == Level.ANYTHING:
        return anything(node, "the number of rows enters as a number")
    value = _value(ctx, node)
    if found.level == Level.LENGTH:
        resolved = _resolved(ctx, node, found, facts, numbers)
        if resolved is not None:
            return resolved
        if found.why is None:
            found = replace(
                found, why=Reason(f"the sequence length enters {target_name(node)} as a number", node)
            )
    return replace(found, length=value)


def as_values(node: Node, fact: Fact) -> Fact:
    """What becomes of indices (of rows, of kept logits) that something else than an index uses."""
    if isinstance(fact.knows, Kept):
        return anything(node, "it computes with the indices of the wanted logits")
    if isinstance(fact.knows, Located) and fact.why is not None:
        return anything(node, "it computes with the places of rows or tokens in a list")
    return anything(node, "", (fact,))


def aligned(dims: Sequence[tuple[Dim, ...]], size: int) -> tuple[Dim, ...] | None:
    """The dimensions of a broadcast result; None where two that line up have different factors."""
    found: list[Dim] = []
    for back in range(size, 0, -1):
        present = {each[-back] for each in dims if len(each) >= back} - {()}
        if len(present) > 1:
            return None
        found.append(present.pop() if present else ())
    return tuple(found)


def told(fact: Fact) -> str:
    """Dimensions in words: [batch, token, 48]."""
    return f"[{', '.join(' x '.join(map(str, dim)) or '1' for dim in fact.dims)}]"


def _knowledge(ctx: Context, node: Node, facts: Sequence[Fact]) -> Any:
    """What is known of the values of a cast, or of a place divided by the last sizes."""
    (fact,) = facts
    name, known = target_name(node), fact.knows
    if name in _SAME_VALUES:
        return known
    if isinstance(known, Located) and name in ("floor_divide", "div") and len(node.args) > 1:
        rounded = name == "floor_divide" or node.kwargs.get("rounding_mode") in ("floor", "trunc")
        last = known.of[-1] if known.of else None
        if node.args[1] == 1:
            return known
        if rounded and last is not None and last.role == "free" and last.size.number == node.args[1]:
            return Located(known.of[:-1])
    return None


def _filled(ctx: Context, node: Node) -> Choice | None:
    """Choices, some of which become another number; where these are all the last ones, there is one choice less."""
    if node.target is not torch.ops.aten.masked_fill.Scalar:
        return None
    chosen, mask, number = node.args
    known = ctx.fact(chosen).knows
    if not isinstance(known, Choice) or not isinstance(number, int) or not 0 <= number < known.count:
        return None
    last = known.count - 1
    assert isinstance(mask, Node)
    is_last = mask.target is torch.ops.aten.eq.Scalar and mask.args == (chosen, last) and number != last
    return Choice(last if is_last else known.count)


def _value(ctx: Context, node: Node) -> sympy.Expr | None:
    """The value where it is affine in the position or in the number of tokens."""
    name = target_name(node)
    if node.meta["val"].dtype in _COARSE or not (name in _SAME_VALUES or name in ("add", "sub", "mul")):
        return None
    if not any(isinstance(arg, Node) and _expression(ctx, arg) is not None for arg in node.args[:2]):
        return None
    operands = [_expression(ctx, arg) for arg in node.args]
    if operands[0] is None:
        return None
    first = operands[0]
    if name in _SAME_VALUES:
        return first
    if len(operands) < 2 or operands[1] is None or node.kwargs.get("alpha", 1) != 1 or len(operands) > 2:
        return None
    second = operands[1]
    if name == "add":
        return sympy.expand(first + second)
    if name == "sub":
        return sympy.expand(first - second)
    if name == "mul" and (first.is_number or second.is_number):
        return sympy.expand(first * second)
    return None


def _expression(ctx: Context, value: object) -> sympy.Expr | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return sympy.Rational(value) if value == value and abs(value) < MOST else None
    return ctx.fact(value).length if isinstance(value, Node) and isinstance(ctx.facts[value], Fact) else None


def _resolved(
    ctx: Context, node: Node, found: Fact, facts: Sequence[Fact], numbers: Sequence[Fact]
) -> Fact | None:
    """A comparison of the length with a constant: the same up to some length."""
    compare = _COMPARE.get(target_name(node))
    sides = [_expression(ctx, arg) for arg in node.args[:2]]
    if compare is None or len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    difference = sympy.expand(sides[0] - sides[1])
    if difference.free_symbols - {N} or not difference.is_polynomial(N) or sympy.degree(difference, N) > 1:
        return None
    most = turning_point(compare, difference)
    if most is not None and most < _FEW:
        return None
    others = [fact for fact in (*facts, *numbers) if fact.level != Level.LENGTH]
    below = replace(joined(others), dims=found.dims)
    limits = [limit for limit in (found.limit, most) if limit is not None]
    return replace(below, limit=min(limits, default=None))


def turning_point(compare: Any, difference: sympy.Expr) -> int | None:
    """The most tokens up to which a comparison of an affine `difference` with 0 is what it is for one token."""

    def truth(tokens: int) -> bool:
        return bool(compare(difference.subs(N, tokens), 0))

    slope, first = sympy.Poly(difference, N).coeff_monomial(N), truth(1)
    if slope == 0:
        return None
    root = -difference.subs(N, 0) / slope
    for tokens in (sympy.floor(root), sympy.floor(root) + 1, sympy.ceiling(root) + 1):
        if tokens > 1 and truth(int(tokens)) != first:
            return int(tokens) - 1
    return None


RULES: dict[str, Rule] = dict.fromkeys((f"aten::{name}" for name in NAMES), pointwise)


__all__ = ["NAMES", "RULES", "Choice", "aligned", "elementwise", "pointwise", "told"]
