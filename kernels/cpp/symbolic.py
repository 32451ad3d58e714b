"""Prints the layouts' sympy expressions as C++ over 64-bit integers: the fourth printer of the same addresses.

The vocabulary is that of `kernels/reference/symbolic.py`. `%` and `/` of C++ truncate, so Mod of what may be negative
is printed such that it has the sign of the divisor, as in Python.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from sympy.core.relational import Relational

_RELATIONS: dict[type, str] = {
    sympy.StrictLessThan: "<",
    sympy.LessThan: "<=",
    sympy.StrictGreaterThan: ">",
    sympy.GreaterThan: ">=",
    sympy.Equality: "==",
    sympy.Unequality: "!=",
}


def printed(expression: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> str:
    """The expression over the variables `names`.

    Raises:
        ValueError: something in it has no form in C++.
    """

    def visit(node: sympy.Basic) -> str:
        match node:
            case sympy.Symbol():
                return names[node]
            case sympy.Integer():
                return str(node) if node >= 0 else f"({node})"
            case sympy.Add():
                # What is taken away stands behind the rest.
                first, *others = sorted(node.args, key=lambda term: term.could_extract_minus_sign())
                text = visit(first)
                for term in others:
                    away = term.could_extract_minus_sign()
                    text += f" - {visit(-term)}" if away else f" + {visit(term)}"
                return f"({text})"
            case sympy.Mul():
                return "(" + " * ".join(map(visit, node.args)) + ")"
            case sympy.Mod():
                over, by = map(visit, node.args)
                if node.args[0].is_nonnegative:
                    return f"({over} % {by})"
                return f"(({over} % {by} + {by}) % {by})"
            case sympy.Piecewise():
                *cases, (otherwise, last) = node.args
                if last != sympy.true:
                    raise ValueError(f"Piecewise without a default: {node}")
                result = visit(otherwise)
                for value, condition in reversed(cases):
                    result = f"({visit(condition)} ? {visit(value)} : {result})"
                return result
            case sympy.And():
                return "(" + " && ".join(map(visit, node.args)) + ")"
            case sympy.Or():
                return "(" + " || ".join(map(visit, node.args)) + ")"
            case Relational() if type(node) in _RELATIONS:
                return f"({visit(node.lhs)} {_RELATIONS[type(node)]} {visit(node.rhs)})"
            case _:
                raise ValueError(f"no C++ form of {type(node).__name__} in {expression}")

    return visit(expression)
