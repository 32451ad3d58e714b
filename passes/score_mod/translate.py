"""Translator: the element of a graph's tensor at symbolic places, as an expression.

`element(node, places)` asks the rule of the node's operator (`passes/score_mod/rules/`), which asks for the elements of
the node's own operands that it needs. So a view is arithmetic on places, a mask is a claim about them, and nothing is
ever run at a length. What no rule knows is a leaf where it may be one:

    a tensor made of weights alone           "table", at any places
    what is computed of each token alone     "query" or "key", at the query's or the key's token (`passes/dependence`)
    anything over queries and keys           "pair", at just this query and this key: run again over the cache

else the translation ends, and says at which operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from kvcompile.expression import NB, B, Expr, K, N, Q, const, integer
from kvcompile.passes.dependence import Dependence
from kvcompile.passes.graph import expr, shape, target_name, value
from kvcompile.passes.score_mod.leaves import LeafRef, Untranslatable
from kvcompile.passes.score_mod.make import add, cast, equal, le, lt, make
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.passes.score_mod.tables import Tables

Places = tuple[Expr, ...]
Rule = Callable[["Translator", Node, Places], Expr]


class Translator:
    """Translates the nodes of one captured graph."""

    def __init__(
        self, dependence: Dependence, prover: Prover, rules: Mapping[str, Rule], sizes: Sequence[Any]
    ):
        """sizes: the symbols of the batch and of the sequence"""
        self.dependence, self.prover, self.rules = dependence, prover, rules
        self.batch, self.seq = sizes
        self.stops: dict[Node, Callable[[Places], Expr]] = {}
        self.tables = Tables(self)
        self.moving = False  # whether elements are only followed to where they come from: nothing is a leaf
        self.behind: set[Node] = set()  # what is computed from the scores: never a leaf
        self._memo: dict[tuple[Node, Places], Expr | Untranslatable] = {}

    def element(self, node: Node, places: Places) -> Expr:
        """The element of `node` at `places`, one for each of its dimensions; raises Untranslatable."""
        key = (node, places)
        if key not in self._memo:
            try:
                self._memo[key] = self._element(node, places)
            except Untranslatable as end:
                self._memo[key] = end
        found = self._memo[key]
        if isinstance(found, Untranslatable):
            raise found
        return found

    def forget(self, nodes: set[Node]) -> None:
        """Forget what was translated with other stops."""
        self._memo = {key: found for key, found in self._memo.items() if key[0] not in nodes}

    def _element(self, node: Node, places: Places) -> Expr:
        assert len(places) == len(shape(node)), (
            f"{node} has {len(shape(node))} dimensions, {len(places)} places"
        )
        if node in self.stops:
            return self.stops[node](places)
        if node.op == "placeholder":
            return self._input(node, places)
        if self.tables.has(node):
            try:
                return self.tables.element(node, places)
            except Untranslatable:  # places that depend on the length: what it is made of may be read there
                if node.op != "call_function" or target_name(node) not in self.rules:
                    raise
                return self.rules[target_name(node)](self, node, places)
        leaf = self._of_token(node, places)
        if leaf is not None:
            return leaf
        try:
            rule = self.rules.get(target_name(node))
            if rule is None:
                raise Untranslatable(f"no translation of {node.target}", node)
            return rule(self, node, places)
        except Untranslatable:
            pair = None if self.moving or node in self.behind else self._of_pair(node, places)
            if pair is None:
                raise
            return pair

    def _input(self, node: Node, places: Places) -> Expr:
        if node.target == "position_ids" and places[0] is B:
            return places[1]  # by contract: 0, 1, 2, .. in every sequence, however it is padded
        leaf = self._of_token(node, places)
        if leaf is None:
            raise Untranslatable(f"{node.name} is read at another place than the query's or the key's", node)
        return leaf

    def _of_token(self, node: Node, places: Places) -> Expr | None:
        """A leaf of the query's or the key's token, where `node` is computed of each token alone."""
        if self.moving or not self.dependence.is_local(node) or self.dependence.is_positional(node):
            return None
        batch, token = self.dependence.batch_dim(node), self.dependence.token_dim(node)
        if batch is None or token is None or places[batch] is not B:
            return None
        rest = tuple(place for dim, place in enumerate(places) if dim not in (batch, token))
        if places[token] is Q:
            return Expr("leaf", value(node).dtype, rest, LeafRef("query", node, (batch, token, -1)))
        if places[token] is K:
            return Expr("leaf", value(node).dtype, rest, LeafRef("key", node, (batch, -1, token)))
        return None

    def _of_pair(self, node: Node, places: Places) -> Expr | None:
        """A leaf of the pair, where `node` runs over the queries and the keys and is read at just this pair."""
        sizes = [expr(size) for size in shape(node)]
        over = [dim for dim, size in enumerate(sizes) if size == self.seq]
        if len(over) != 2:
            return None
        queries = [dim for dim in over if places[dim] is Q]
        keys = [dim for dim in over if places[dim] is K]
        batch = [dim for dim, size in enumerate(sizes) if size == self.batch]
        if len(queries) != 1 or len(keys) != 1 or len(batch) > 1 or (batch and places[batch[0]] is not B):
            return None
        dims = (batch[0] if batch else -1, queries[0], keys[0])
        rest = tuple(place for dim, place in enumerate(places) if dim not in dims)
        if any(not size.is_Integer for dim, size in enumerate(sizes) if dim not in dims):
            return None
        return Expr("leaf", value(node).dtype, rest, LeafRef("pair", node, dims))

    # What rules need.

    def operand(self, node: Node, argument: object, places: Places, dtype: torch.dtype) -> Expr:
        """An operand of a pointwise operator: a tensor that broadcasts to the places of the result, or a number."""
        if not isinstance(argument, Node) or not isinstance(value(argument), torch.Tensor):
            return self.number(argument, dtype)
        return self.element(argument, self.broadcast(argument, places))

    def broadcast(self, source: Node, places: Places) -> Places:
        """The places in a tensor that broadcasts to a result read at `places`."""
        sizes = shape(source)
        own = places[len(places) - len(sizes) :]
        return tuple(integer(0) if is_one(size) else place for size, place in zip(sizes, own, strict=True))

    def number(self, argument: object, dtype: torch.dtype | None = None) -> Expr:
        """A number of the graph: a literal, or an integer computed from sizes."""
        if isinstance(argument, Node):
            argument = value(argument)
        if isinstance(argument, (torch.SymInt, sympy.Expr)):
            found = self.size(expr(argument) if isinstance(argument, torch.SymInt) else argument)
            return found if dtype is None else cast(found, dtype)
        if isinstance(argument, (bool, int, float)):
            if dtype is None:
                dtype = torch.int64 if isinstance(argument, int) else torch.float32
            return const(argument, dtype)
        raise Untranslatable(
            f"a number of type {type(argument).__name__}", next(iter(self.stops), self.any_node)
        )

    @property
    def any_node(self) -> Node:
        node: Node = next(iter(self.dependence.graph_module.graph.nodes))
        return node

    def size(self, found: Any) -> Expr:
        """A size, a sympy expression of the batch and the sequence."""
        found = sympy.sympify(found)
        if found.free_symbols & self.dependence.ctx.same.keys():  # other symbols for the same sizes
            found = found.xreplace(self.dependence.ctx.same)
        if found.is_Integer:
            return integer(int(found))
        if found == self.seq:
            return N
        if found == self.batch:
            return NB
        if found.is_Add:
            return add(*(self.size(arg) for arg in found.args))
        if found.is_Mul:
            made = integer(1)
            for arg in found.args:
                made = make("mul", torch.int64, made, self.size(arg))
            return made
        if found.is_Pow and found.exp.is_Integer and 0 < found.exp < 4:
            return self.size(sympy.Mul(*[found.base] * int(found.exp), evaluate=False))
        name = type(found).__name__
        if name in ("Min", "Max"):
            made, *others = (self.size(arg) for arg in found.args)
            for other in others:
                made = make(name.lower(), torch.int64, made, other)
            return made
        if name in ("FloorDiv", "CleanDiv") and found.args[1].is_Integer:
            return make("floordiv", torch.int64, self.size(found.args[0]), self.size(found.args[1]))
        raise Untranslatable(f"a size {found}", self.any_node)

    def from_end(self, node: Node, source: Node, dim: int, argument: object) -> Expr:
        """A place along a dimension that may count from its end."""
        place = self.number(argument, torch.int64)
        size = self.number(shape(source)[dim], torch.int64)
        if place.is_const:
            return place if place.value >= 0 else add(size, place)
        if self.prover.holds(le(integer(0), place)):
            return place
        if self.prover.holds(lt(place, integer(0))):
            return add(size, place)
        raise Untranslatable(f"{node.target} from a place that may count from either end", node)

    def split(self, place: Expr, size: Expr, node: Node) -> tuple[Expr, Expr]:
        """place // size and place % size."""
        if place.op == "flat" and place.args[-1] is size:
            return place.args[0], place.args[1]
        if size.is_const:
            one = integer(size.value)
            if self.prover.holds(lt(place, one)) and self.prover.holds(le(integer(0), place)):
                return integer(0), place
            return make("floordiv", torch.int64, place, one), make("mod", torch.int64, place, one)
        raise Untranslatable(f"{node.target} takes a dimension apart in a way that is not known", node)

    def joined(self, first: Expr, second: Expr, size: Expr) -> Expr:
        """first * size + second, 0 <= second < size."""
        if first.is_const and first.value == 0:
            return second
        if size.is_const and not first.names & {"b", "n", "nb"}:
            return add(make("mul", torch.int64, first, size), second)
        return Expr("flat", torch.int64, (first, second, size))

    def decided(self, claim: Expr) -> Expr:
        return self.prover.decided(claim)

    def same(self, a: Expr, b: Expr) -> bool:
        return a is b or self.prover.holds(equal(a, b))


def is_one(size: Any) -> bool:
    found = expr(size)
    return bool(found.is_Integer and int(found) == 1)
