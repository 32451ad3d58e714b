"""What a transfer function may ask: facts of arguments, roles of sizes, and arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import sympy
import torch
from torch.fx import Node

from kvcompile.passes.dependence.facts import Dim, Fact, Factor, Level
from kvcompile.passes.dependence.sizes import ONE, Size
from kvcompile.passes.graph import expr, shape

Result = Fact | tuple[Fact, ...]


class Context:
    """The symbols of a graph's inputs, and the facts known so far."""

    def __init__(self, batch: sympy.Symbol, seq: sympy.Symbol, keep: sympy.Symbol | None):
        self.batch, self.seq, self.keep = batch, seq, keep
        # Sizes of other inputs that are the same, e.g. of position_ids where export gave them symbols of their own.
        self.same: dict[sympy.Symbol, sympy.Symbol] = {}
        self.facts: dict[Node, Result] = {}
        self._sizes: dict[Any, Size | None] = {}

    def fact(self, value: object) -> Fact:
        """The fact of a tensor or number; of a node with several results, never."""
        if not isinstance(value, Node):
            return Fact((), Level.CONSTANT)
        found = self.facts[value]
        assert isinstance(found, Fact), f"{value} is no single tensor"
        return found

    def tensors(self, values: Iterable[object]) -> list[Fact]:
        """Facts of the nodes among `values` that are tensors."""
        return [self.fact(value) for value in values if isinstance(value, Node) and is_tensor(value)]

    def size(self, dim: object) -> Size | None:
        """A dimension as a product; None where it is none."""
        if isinstance(dim, int):
            return Size(dim)
        expression = expr(dim)
        if expression not in self._sizes:
            same = expression.xreplace(self.same) if self.same else expression
            self._sizes[expression] = Size.of(same)
        return self._sizes[expression]

    def learn(self, dim: object, size: Size) -> None:
        """Say what a dimension is whose expression is no product."""
        if not isinstance(dim, int):
            self._sizes[expr(dim)] = size

    def sizes(self, node: Node) -> list[Size] | None:
        """The shape of a node as products; None where one is none."""
        found = [self.size(dim) for dim in shape(node)]
        known = [size for size in found if size is not None]
        return known if len(known) == len(found) else None

    def roles(self, size: Size) -> Dim | None:
        """The factors of a dimension of equal values, by its symbols: rows, then tokens, then the rest."""
        rest = list(size.symbols)
        found: list[Factor] = []
        for role, symbol in (("batch", self.batch), ("token", self.seq), ("keep", self.keep)):
            if symbol in rest:
                rest.remove(symbol)
                found.append(Factor(role, Size(1, (symbol,))))  # type: ignore[arg-type]
        if rest:
            return None
        return (*found, Factor("free", Size(size.number))) if size.number != 1 else tuple(found)

    def created(self, node: Node) -> tuple[Dim, ...] | None:
        """The dimensions of a new tensor of `node`'s shape; None where a size is no product of B, S and K."""
        sizes = self.sizes(node)
        dims = None if sizes is None else [self.roles(size) for size in sizes]
        if dims is None or any(dim is None for dim in dims):
            return None
        return tuple(dim for dim in dims if dim is not None)

    def agrees(self, node: Node, fact: Fact) -> bool:
        """Whether a fact's dimensions have the sizes of the node."""
        sizes = shape(node)
        if len(sizes) != len(fact.dims):
            return False
        for dim, size in zip(fact.dims, sizes, strict=True):
            whole = ONE
            for factor in dim:
                whole = whole * factor.size
            if self.size(size) != whole:
                return False
        return True


Rule = Callable[[Context, Node], Result]


@cache
def _schema(target: Any) -> tuple[tuple[str, Any, bool], ...]:
    return tuple((a.name, a.default_value, a.kwarg_only) for a in target._schema.arguments)


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator by the names of its schema, with defaults."""
    found: dict[str, Any] = {}
    for place, (name, default, only) in enumerate(_schema(node.target)):
        given = not only and place < len(node.args)
        found[name] = node.args[place] if given else node.kwargs.get(name, default)
    return found


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def rank(node: Node) -> int:
    return len(shape(node))


def nodes_in(value: object) -> list[Node]:
    """The nodes in an argument: itself, or in lists."""
    if isinstance(value, Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [node for item in value for node in nodes_in(item)]
    return []


def whole_numbers(values: object) -> list[int] | None:
    """A list of plain integers, or None."""
    given = values if isinstance(values, (list, tuple)) else [values]
    found = [value for value in given if isinstance(value, int)]
    return found if len(found) == len(given) else None
