"""Tables: tensors made of weights and constants alone, read at places that positions and heads decide.

What a buffer holds is known, so a table [.., L, L] that is read at the query and the key is compared, all of it, with
the closed forms (causal, a band, chunks): an equality over the table's whole domain is a proof, and beyond it the
model itself has no values. What is no closed form stays a table: a leaf that is read again. Trained weights are always
leaves: they may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.fx import Node

from kvcompile.expression import LONGEST_TABLE, Expr, K, N, Q, const, integer
from kvcompile.passes.graph import value
from kvcompile.passes.probe.evaluate import evaluate, fetch_attr
from kvcompile.passes.score_mod.hiding import HIDDEN
from kvcompile.passes.score_mod.leaves import LeafRef, Untranslatable
from kvcompile.passes.score_mod.make import and_, le, linear, lt, make, not_, or_, where

if TYPE_CHECKING:
    from kvcompile.passes.score_mod.translate import Translator

_FLOATS = 2**53  # integers of floats about which nothing is known go below
_OF_LENGTH = {"n", "nb", "b"}
_GAP = 900.0  # between what a table shows and what it hides; what goes down step by step is no mask


class Tables:
    """The tables of one graph, and how far they reach."""

    def __init__(self, translator: Translator):
        self.translator = translator
        graph_module = translator.dependence.graph_module
        self.graph_module = graph_module
        self._made: set[Node] = set()
        self._trained: set[Node] = set()
        for node in graph_module.graph.nodes:
            if node.op == "get_attr":
                self._made.add(node)
                if isinstance(fetch_attr(graph_module, str(node.target)), nn.Parameter):
                    self._trained.add(node)
            elif node.op == "call_function" and all(n in self._made for n in node.all_input_nodes):
                self._made.add(node)
                if any(n in self._trained for n in node.all_input_nodes):
                    self._trained.add(node)
        self.reads: dict[
            tuple[Expr, int], Node
        ] = {}  # places, the size they must stay below, and in which table
        self._values: dict[Node, Tensor] = {}

    def has(self, node: Node) -> bool:
        return node in self._made and isinstance(value(node), Tensor)

    def trained(self, node: Node) -> bool:
        return node in self._trained

    def value(self, node: Node) -> Tensor:
        if node not in self._values:
            self._values[node] = evaluate(self.graph_module, [node], {})[0].detach()
        return self._values[node]

    def element(self, node: Node, places: tuple[Expr, ...]) -> Expr:
        """An element of a table; places that count from its end come as they are."""
        sizes = [int(size) for size in value(node).shape]
        found = None if self.trained(node) else self._known(node, places)
        # Of places that move with the length, what is known may say nothing: where both do, a distance stays.
        if any(part.names & _OF_LENGTH for part in ([*places] if found is None else [found])):
            raise Untranslatable(f"{node.name} is read at a place that depends on the text's length", node)
        self.reads.update(
            {(place, size): node for place, size in zip(places, sizes, strict=True) if not place.is_const}
        )
        if found is not None:
            return found
        return Expr("leaf", value(node).dtype, places, LeafRef("table", node))

    def _known(self, node: Node, places: tuple[Expr, ...]) -> Expr | None:
        """What a table holds there, where that is a number or a closed form."""
        held = self.value(node)
        left: list[Expr] = []
        for place in places:
            if place.is_const:
                held = held.select(len(left), place.value)
            else:
                left.append(place)
        if held.is_complex():
            return None
        if held.numel() == 1 or (held.numel() and bool((held == held.reshape(-1)[0]).all())):
            return const(held.reshape(-1)[0].item(), held.dtype)
        if held.numel() > LONGEST_TABLE:
            return None
        rows = [i for i, place in enumerate(left) if self._follows(place, Q)]
        columns = [i for i, place in enumerate(left) if self._follows(place, K)]
        if len(left) == 2 and len(rows) == 1 and len(columns) == 1:
            table = held.movedim((rows[0], columns[0]), (0, 1))
            return self._pattern(node, places, table, left[rows[0]], left[columns[0]])
        if not rows and len(left) == 1 and len(columns) == 1:
            return None
        if len(rows) == 1 and len(columns) == 1:
            table = held.movedim((rows[0], columns[0]), (-2, -1)).reshape(
                -1, held.shape[rows[0]], held.shape[columns[0]]
            )
            return self._hides_the_future(node, places, table, left[rows[0]], left[columns[0]])
        return None

    def _follows(self, place: Expr, variable: Expr) -> bool:
        """Whether a place is variable + what is the same for all queries and keys, and never counts from the end."""
        offset, factors = linear(place)
        if factors.get(variable) != 1:
            return False
        rest = {term: factor for term, factor in factors.items() if term is not variable}
        if not rest:
            return offset >= 0
        same = all(term.names <= _OF_LENGTH for term in rest)
        return same and self.translator.prover.holds(le(integer(0), place))

    def _pattern(
        self, node: Node, places: tuple[Expr, ...], table: Tensor, row: Expr, column: Expr
    ) -> Expr | None:
        """where(closed form, a, b) of a table [L, L'] of two values."""
        last, first = table[-1, 0], table[0, -1]
        for shown, hidden in ((table[0, 0], first), (table[0, 0], last)):
            if bool(shown == hidden) or not bool(((table == shown) | (table == hidden)).all()):
                continue
            claim = closed_form(table == shown, row, column)
            if claim is not None:
                yes, no = (const(x.item(), table.dtype) for x in (shown, hidden))
                return where(claim, yes, no)
        return self._hides_the_future(node, places, table[None], row, column)

    def _hides_the_future(
        self, node: Node, places: tuple[Expr, ...], tables: Tensor, row: Expr, column: Expr
    ) -> Expr | None:
        """A table that hides: which of its parts, and what it shows elsewhere; facts by looking at all of it."""
        leaf = Expr("leaf", tables.dtype, places, LeafRef("table", node))
        i = torch.arange(tables.shape[1], device=tables.device)[:, None]
        j = torch.arange(tables.shape[2], device=tables.device)
        past, own = j <= i, j == i
        if tables.dtype == torch.bool:
            for shown, polarity in ((tables, True), (~tables, False)):
                claim = leaf if polarity else not_(leaf)
                if not bool((shown & ~past).any()):
                    claim = and_(le(column, row), claim)
                    if bool((shown | ~own).all()):
                        claim = or_(make("eq", torch.bool, column, row), claim)
                    return claim if polarity else not_(claim)
            return None
        if not tables.is_floating_point():
            return None
        shown = tables > HIDDEN
        if bool(tables.isnan().any()) or bool(shown.all()) or not bool(shown.any()):
            return None
        most = tables[~shown].max()
        if float(tables[shown].min()) - float(most) < _GAP:
            return None
        hidden = const(float(most), tables.dtype)
        if not bool((tables[~shown] == most).all()):  # it is the table's own value, which says that it hides
            hidden = make("min", tables.dtype, leaf, hidden)
        pattern = closed_form(shown[0], row, column) if bool((shown == shown[:1]).all()) else None
        if pattern is not None:
            return where(pattern, leaf, hidden)
        seen = make("gt", torch.bool, leaf, const(HIDDEN, tables.dtype))
        if not bool((shown & ~past).any()):
            seen = and_(le(column, row), seen)
            if bool((shown | ~own).all()):
                seen = or_(make("eq", torch.bool, column, row), seen)
        return where(seen, leaf, hidden)

    def limit(self) -> tuple[int, Node] | None:
        """How many tokens the tables are long enough for, and the one that ends first; None: any text."""
        prover, found = self.translator.prover, None
        for (place, size), node in self.reads.items():
            if not place.names & {"q", "k"} or place.names & {"leaf", "reduction"}:
                continue
            inside = lt(place, integer(size))
            found_range = prover.exact(place)
            # Else it is an integer made of a float that may be anything: where it is below, the model fails by itself.
            if found_range is not None and found_range.low > -_FLOATS:
                inside = and_(inside, le(integer(-size), place))
            if prover.holds(inside):
                continue
            low, high = 0, LONGEST_TABLE
            guess = linear(place)
            offset = guess[0] if len(guess[1]) == 1 else 0
            for bound in (size - offset,):  # nearly always this
                if bound > 0 and prover.holds(inside, le(N, integer(bound))):
                    low = bound
                    if not prover.holds(inside, le(N, integer(bound + 1))):
                        high = bound + 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if prover.holds(inside, le(N, integer(middle))) else (low, middle)
            if low and (found is None or low < found[0]):
                found = (low, node)
        return found


def closed_form(shown: Tensor, row: Expr, column: Expr) -> Expr | None:
    """The claim that a pattern [L, L'] of row and column is, over all of it: causal, a band, chunks; or None."""
    height, width = shown.shape
    i = torch.arange(height, device=shown.device)[:, None]
    j = torch.arange(width, device=shown.device)
    past = j <= i
    if torch.equal(shown, past):
        return le(column, row)
    if torch.equal(shown, j < i):
        return lt(column, row)
    band = int(shown[-1].sum()) if height <= width else 0
    if band and torch.equal(shown, past & (i - j < band)):
        return and_(le(column, row), lt(make("sub", torch.int64, row, column), integer(band)))
    chunk = int(shown[:, 0].sum())
    if 0 < chunk < height and torch.equal(shown, past & (i // chunk == j // chunk)):
        parts = [make("floordiv", torch.int64, place, integer(chunk)) for place in (row, column)]
        return and_(le(column, row), make("eq", torch.bool, *parts))
    return None
