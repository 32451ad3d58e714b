"""Rule `rope`: rotary embedding of queries and keys (Su et al. 2021), however it is spelled.

    out = x * cos + rotate(x) * sin,   rotate((a, b)) = (-b, a) on halves or on neighbours, on a range of channels

Nothing is matched by its spelling. `passes/detect/rotation.py` finds where functions of the positions enter between the
projections and the scores, and what they do there is found by evaluating: rotate-half, split halves, interleaved
pairs, complex products, de-interleaved halves, partial embeddings of the first or the last channels, a norm behind
the rotation. Queries and keys must turn alike. What is not a rotation stays in the graph as it is, which is
correct, and the site has no RopeSpec.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.detect.at_zero import clone_at_zero
from kvcompile.passes.detect.rotary_form import NotRotary
from kvcompile.passes.detect.rotation import Rotations
from kvcompile.passes.graph import expr, shape
from kvcompile.passes.probe.probe import Prober
from kvcompile.passes.records import NoMatch, RopeSpec, Rotation
from kvcompile.passes.rules import dtypes
from kvcompile.passes.rules.block import no_match
from kvcompile.specs import RotaryForm

NAME = "rope"
_PROBES = (1, 4, 5)  # a, b and a + b
# Positions to try last, where the slowest channels have turned, too; a table may end before.
_FAR = (900, 255, 127, 63, 31, 15)


@dataclass(frozen=True)
class _Known:
    """What was found out about rotations of one text."""

    form: RotaryForm
    cos: Tensor
    sin: Tensor


class RopeRule:
    """The rule for the sites of one graph; layers that rotate alike are evaluated once."""

    def __init__(self, prober: Prober):
        self.prober = prober
        self.rotations = Rotations(prober.graph_module)
        self._tables: dict[tuple[Node, ...], tuple[int, list[Tensor]]] = {}
        self._known: dict[tuple[str, str], _Known | str] = {}
        self._inputs: dict[Node, Node] = {}

    def match(self, q: Node, k: Node) -> RopeSpec | NoMatch:
        """The rotary embedding of queries and keys [B, H, S, D], or why none was found."""
        found = [self.rotations.find(node) for node in (q, k)]
        turned_q, turned_k = found
        if turned_q is None and turned_k is None:
            return no_match(NAME, "no positions enter between the projections and the scores", k)
        if turned_q is None or turned_k is None:
            which = "keys" if turned_q is None else "queries"
            return no_match(NAME, f"positions enter the {which} alone", k)
        try:
            key = (self.rotations.signature(turned_q), self.rotations.signature(turned_k))
            if key not in self._known:
                self._known[key] = self._learn(turned_q, turned_k)
            known = self._known[key]
            if isinstance(known, str):
                raise NotRotary(known)
            q_input, k_input = (self._input(rotation) for rotation in (turned_q, turned_k))
        except NotRotary as refused:
            return no_match(NAME, f"positions enter queries and keys, but {refused}", k)
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
        return RopeSpec(known.form, q_input, k_input, turned_q, turned_k, name)

    def _values(self, rotation: Rotation) -> list[Tensor]:
        """The rotation's tables, for as many positions as `_reach` says."""
        return self._reach(rotation)[1]

    def _reach(self, rotation: Rotation) -> tuple[int, list[Tensor]]:
        """The last position of _FAR that the rotation's tables have, and the tables up to there."""
        if rotation.tables not in self._tables:
            problem = ""
            for far in _FAR:
                if far >= self.prober.max_seq_len:
                    continue
                try:
                    values = self.rotations.table_values(rotation, self.prober.inputs(1, far + 1))
                except (RuntimeError, IndexError, ValueError, TypeError) as error:
                    problem = problem or (str(error).splitlines() or [type(error).__name__])[0][:200]
                    continue
                self._tables[rotation.tables] = (far, values)
                break
            else:
                raise NotRotary(f"their tables cannot be evaluated: {problem}")
        return self._tables[rotation.tables]

    def _learn(self, q: Rotation, k: Rotation) -> _Known | str:
        """Form and tables of a pair of rotations; a text says why there are none."""
        try:
            far = min(self._reach(rotation)[0] for rotation in (q, k))
            form, maps = self.rotations.fit(k, self._values(k), (*_PROBES, far))
            own, of_queries = self.rotations.fit(q, self._values(q), (*_PROBES, far))
            if own != form or not torch.allclose(maps, of_queries, rtol=0, atol=1e-6):
                return "queries and keys are rotated differently"
            cos, sin = self.rotations.tabulate(k, self._values(k), form, far + 1)
            self.rotations.follows(q, self._values(q), form, cos, sin)
        except NotRotary as refused:
            return str(refused)
        return _Known(form, cos, sin)

    def _input(self, rotation: Rotation) -> Node:
        """The node that is rotated: one of the graph if there is one, else a copy of the rotation at position 0.

        In the dtype of the rotation's result, which may be another one: Llama rotates in float32.
        """
        if rotation.output not in self._inputs:
            found = self._whole(rotation) or clone_at_zero(self.rotations, rotation, self._values(rotation))
            self._inputs[rotation.output] = dtypes.cast(found, dtypes.of(rotation.output))
        return self._inputs[rotation.output]

    def _whole(self, rotation: Rotation) -> Node | None:
        """A node before the rotation that is, number for number, its output at position 0."""
        rotations, output = self.rotations, rotation.output
        behind = set(rotations.rotated(rotation))
        sizes = [expr(size) for size in shape(output)]
        before = [*rotations.region([output], rotation), *rotation.roots]
        before = [n for n in before if n not in behind and [expr(size) for size in shape(n)] == sizes]
        if not before:
            return None
        where = torch.zeros(3, dtype=torch.int64)
        roots = rotations.roots(rotation, 2, 3)
        tables = rotations.at(rotation, self._values(rotation), where, 2)
        *values, wanted = rotations.run([*before, output], rotation, tables, roots, 2, 3)
        return next((n for n, x in zip(before, values, strict=True) if torch.equal(x, wanted)), None)
