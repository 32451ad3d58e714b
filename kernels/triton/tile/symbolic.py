"""Prints the layouts' sympy expressions as Triton: the third printer of the same addresses.

The vocabulary is that of `kernels/reference/symbolic.py`. Integer `%` and `//` truncate on a GPU and round down in
Triton's interpreter, so Mod is printed such that both give Python's.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from kvcompile.layouts import symbols as sy


def printed(expression: sympy.Basic, names: Mapping[sympy.Symbol, str], table: str = "") -> str:
    """The expression as a Triton expression over the variables `names` (blocks or scalars).

    table: a template with `{}` for the entry, for the page that stands at an entry of the page table

    Raises:
        ValueError: something in it has no Triton form.
    """

    def visit(node: sympy.Basic) -> str:
        match node:
            case sympy.Symbol():
                return names[node]
            case sympy.Integer():
                return str(node) if node >= 0 else f"({node})"
            case sympy.Add():
                # What is taken away stands behind the rest.
                terms = sorted(node.args, key=lambda term: term.could_extract_minus_sign())
                first, *others = terms
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
            case sympy.floor():
                over, by = sympy.fraction(node.args[0])
                return f"({visit(over)} // {visit(by)})"
            case sympy.Piecewise():
                *cases, (otherwise, last) = node.args
                if last != sympy.true:
                    raise ValueError(f"Piecewise without a default: {node}")
                result = visit(otherwise)
                for value, condition in reversed(cases):
                    result = f"tl.where({visit(condition)}, {visit(value)}, {result})"
                return result
            case sympy.StrictLessThan():
                return f"({visit(node.lhs)} < {visit(node.rhs)})"
            case _ if isinstance(node, sympy.core.function.AppliedUndef) and node.func == sy.table and table:
                return table.format(visit(node.args[0]))
            case _:
                raise ValueError(f"no Triton form of {type(node).__name__} in {expression}")

    return visit(expression)
