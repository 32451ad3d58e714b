"""Sizes as TensorRT's symbolic expressions: what `tensorrt.plugin` has of dimensions, and nothing else.

| sympy | TensorRT |
|---|---|
| a size of an input | its `shape_expr[dim]` |
| a + b, a - b, a * b | SUM, SUB, PROD |
| a // b, and -(-a // b) | FLOOR_DIV, CEIL_DIV |
| Min, Max | MIN, MAX |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.functions import Max as TorchMax
from torch.utils._sympy.functions import Min as TorchMin

from kvcompile.backends.tensorrt_plugins.launched import Shape
from kvcompile.errors import KernelError

Binary = Callable[[Any, Any], Any]


def symbolic(
    expression: sympy.Expr, sizes: Mapping[sympy.Expr, Any], cdiv: Binary, minimum: Binary, maximum: Binary
) -> Any:
    """The expression over `sizes`: an int where it is one, else what their `+ - * //` and the functions give.

    Raises:
        KernelError: it holds a symbol that is no size of an input, or an operation that TensorRT has not.
    """

    def fold(function: Binary, values: Sequence[Any]) -> Any:
        # A symbolic number stands first.
        return reduce(function, sorted(values, key=lambda value: isinstance(value, int)))

    def visit(node: sympy.Basic) -> Any:
        if isinstance(node, sympy.Integer):
            return int(node)
        if node in sizes:
            return sizes[node]
        match node:
            case sympy.Add():
                added = [visit(term) for term in node.args if not term.could_extract_minus_sign()]
                taken = [visit(-term) for term in node.args if term.could_extract_minus_sign()]
                if not added:
                    raise KernelError(f"{expression} is negative, and TensorRT's sizes are not")
                total = fold(lambda a, b: a + b, added)
                return reduce(lambda a, b: _lifted(a, b) - b, taken, total)
            case sympy.Mul() if _is_ceiling(node):
                (division,) = [arg for arg in node.args if isinstance(arg, FloorDiv)]
                rest = [arg for arg in node.args if arg is not division and arg != -1]
                over, by = division.args
                return fold(lambda a, b: a * b, [cdiv(visit(-over), visit(by)), *map(visit, rest)])
            case sympy.Mul():
                return fold(lambda a, b: a * b, [visit(factor) for factor in node.args])
            case FloorDiv():
                over, by = map(visit, node.args)
                return _lifted(over, by) // by
            case TorchMax() | sympy.Max():
                return fold(maximum, [visit(value) for value in node.args])
            case TorchMin() | sympy.Min():
                return fold(minimum, [visit(value) for value in node.args])
        raise KernelError(
            f"{node} in {expression} is no size of an input, and nothing that TensorRT computes"
        )

    return visit(expression)


def sizes_of(shapes: Sequence[Shape], values: Sequence[Sequence[Any]]) -> dict[sympy.Expr, Any]:
    """What each size of the inputs is called: its expression -> the first of `values` that stands at it."""
    found: dict[sympy.Expr, Any] = {}
    for shape, row in zip(shapes, values, strict=True):
        for size, value in zip(shape, row, strict=True):
            if not size.is_number:
                found.setdefault(size, value)
    return found


def _lifted(value: Any, like: Any) -> Any:
    """A number as a symbolic one where `like` is: TensorRT's have no reflected operators."""
    return like * 0 + value if isinstance(value, int) and not isinstance(like, int) else value


def _is_ceiling(node: sympy.Mul) -> bool:
    """Whether it is -(-a // b), times something."""
    divisions = [arg for arg in node.args if isinstance(arg, FloorDiv)]
    return (
        node.could_extract_minus_sign()
        and len(divisions) == 1
        and bool(divisions[0].args[0].could_extract_minus_sign())
    )
