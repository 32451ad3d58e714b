"""Sizes as products: c * B^a * S^b * .., which is all that sizes of a decoder's tensors are.

A size that is no product (S + 1, S // 4) has no factors that a role could be told from; `of` is None for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy


@dataclass(frozen=True)
class Size:
    """number * the product of the symbols; symbols are sorted by name, with repetitions."""

    number: int
    symbols: tuple[sympy.Symbol, ...] = ()

    @staticmethod
    def of(expression: sympy.Expr | int) -> Size | None:
        """The product that an expression is, or None."""
        if isinstance(expression, int):
            return Size(expression)
        if expression.is_Integer:
            return Size(int(expression))
        if expression.is_Symbol:
            return Size(1, (expression,))
        if not expression.is_Mul and not expression.is_Pow:
            return None
        number, symbols = 1, []
        for factor in expression.args if expression.is_Mul else (expression,):
            base, power = factor.as_base_exp()
            if base.is_Integer and power == 1:
                number *= int(base)
            elif base.is_Symbol and power.is_Integer and power > 0:
                symbols += [base] * int(power)
            else:
                return None
        return Size(number, tuple(sorted(symbols, key=_name)))

    def __mul__(self, other: Size) -> Size:
        if not (self.symbols and other.symbols):
            return Size(self.number * other.number, self.symbols or other.symbols)
        symbols = tuple(sorted((*self.symbols, *other.symbols), key=_name))
        return Size(self.number * other.number, symbols)

    def over(self, other: Size) -> Size | None:
        """The exact quotient, or None."""
        left = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in left:
                return None
            left.remove(symbol)
        if not other.number or self.number % other.number:
            return None
        return Size(self.number // other.number, tuple(left))

    def __str__(self) -> str:
        return "*".join([*([str(self.number)] if self.number != 1 else []), *map(str, self.symbols)]) or "1"


def _name(symbol: sympy.Symbol) -> str:
    return str(symbol.name)


ONE = Size(1)


def product(sizes: list[Size]) -> Size:
    """The size of several dimensions together."""
    found = ONE
    for size in sizes:
        found = found * size
    return found
