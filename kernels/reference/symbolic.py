"""Evaluates the layouts' sympy expressions on integer tensors (the reference's printer)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch import Tensor

_RELATIONS: dict[type, Callable[[Any, Any], Any]] = {
    sympy.StrictLessThan: operator.lt,
    sympy.LessThan: operator.le,
    sympy.StrictGreaterThan: operator.gt,
    sympy.GreaterThan: operator.ge,
    sympy.Equality: operator.eq,
    sympy.Unequality: operator.ne,
}


def evaluate(expression: sympy.Basic, values: dict[sympy.Symbol, Tensor]) -> Tensor:
    """The expression's value, elementwise over broadcastable int64 tensors (bool for a relation).

    Integers, sums, products, Mod (the sign of the divisor, as in Python), floor of a quotient, Piecewise and
    comparisons: the vocabulary of `kvcompile.layouts`. Anything else is a ValueError.
    """
    like = next(iter(values.values()))

    def visit(node: sympy.Basic) -> Tensor | int:
        match node:
            case sympy.Symbol():
                return values[node]
            case sympy.Integer():
                return int(node)
            case sympy.Add():
                return _fold(lambda a, b: a + b, [visit(arg) for arg in node.args])
            case sympy.Mul():
                return _fold(lambda a, b: a * b, [visit(arg) for arg in node.args])
            case sympy.Mod():
                return torch.remainder(_tensor(visit(node.args[0]), like), visit(node.args[1]))
            case sympy.floor():
                over, by = sympy.fraction(node.args[0])
                return torch.div(_tensor(visit(over), like), visit(by), rounding_mode="floor")
            case sympy.Piecewise():
                *cases, (otherwise, last) = node.args
                if last != sympy.true:
                    raise ValueError(f"Piecewise without a default: {node}")
                result = _tensor(visit(otherwise), like)
                for value, condition in reversed(cases):
                    result = torch.where(_tensor(visit(condition), like), visit(value), result)
                return result
            case Relational() if type(node) in _RELATIONS:
                found: Tensor = _RELATIONS[type(node)](_tensor(visit(node.lhs), like), visit(node.rhs))
                return found
            case _:
                raise ValueError(f"no torch form of {type(node).__name__} in {expression}")

    return _tensor(visit(expression), like)


def _fold(function: object, values: list[Tensor | int]) -> Tensor | int:
    result = values[0]
    for value in values[1:]:
        result = function(result, value)  # type: ignore[operator]
    return result


def _tensor(value: Tensor | int, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value)
