"""Wishes: which values should be cut, walked from where a cut is used back to the linear layers that make it.

    attention sites     their queries, keys and values by heads
    rows                the operand of a linear layer, where all that it is made of can be cut as well: back to linear
                        layers that are then cut by columns, or to the result of a divided site
    logits              by vocabulary, back to the head

A wish decides nothing about what is computed: `build.py` cuts what it can prove, and brings everything else together.
A value has a wish only where all that use it want the same of it; what is used whole, is computed whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Node

from kvcompile.passes.graph import source_line, target_name
from kvcompile.passes.shard.cuts import Cut, Indices, Placement, blocks, cut_of, is_whole, whole
from kvcompile.passes.shard.form import Form, sizes
from kvcompile.passes.shard.ties import Slice

Edge = tuple[Node, Node]  # (user, used)


@dataclass
class Wishes:
    """By value, the placement that all of its users want; and why linear layers are not cut by rows.

    fixed: placements that are known already: of the results of divided sites
    """

    forms: Mapping[Node, Form]
    constants: frozenset[Node]
    order: Mapping[Node, int]
    fixed: Mapping[Node, Placement]
    kept: Mapping[Node, int] = field(default_factory=dict)  # how many uses a value has besides its users
    wanted: dict[Node, Placement] = field(default_factory=dict)
    rows: set[Node] = field(default_factory=set)
    because: dict[Node, str] = field(default_factory=dict)
    stopped: dict[Node, str] = field(default_factory=dict)  # where walks of sites and heads ended, and why

    def why(self, linear: Node) -> str:
        """Why a linear layer is cut neither by columns nor by rows."""
        node = linear
        while node is not None and node not in self.stopped and node not in self.fixed:
            ahead = [user for user in node.users if self.order[user] > self.order[linear]]
            node = min(ahead, key=self.order.__getitem__) if len(ahead) == 1 else None  # type: ignore[assignment]
        if node is not None and node in self.stopped:
            return self.stopped[node]
        return self.because.get(linear, "its result is used whole")

    def is_linear(self, node: Node) -> bool:
        """A product of what is computed with a weight."""
        return self.weight(node) is not None

    def weight(self, node: Node) -> tuple[Node, int, Node, int] | None:
        """(operand, its dimension that is summed over, weight, its dimension) of a linear layer."""
        form = self.forms.get(node)
        if form is None or form.sum is None:
            return None
        s = form.sum
        if s.right in self.constants and s.left not in self.constants:
            return s.left, s.left_dim, s.right, s.right_dim
        if s.left in self.constants and s.right not in self.constants:
            return s.right, s.right_dim, s.left, s.left_dim
        return None

    def sites(self, edges: Mapping[Edge, Placement]) -> None:
        """Wishes of attention sites: as far back as they go."""
        _Walk(self, edges, strict=False).run()

    def row_linears(self, ranks: int) -> None:
        """Linear layers by rows, from the end of the graph on."""
        for node in sorted(self.forms, key=self.order.__getitem__, reverse=True):
            found = self.weight(node)
            if found is None or node in self.wanted:
                continue
            operand, dim, _, _ = found
            size = sizes(operand)[dim]
            if size is None or size < ranks:
                self.because[node] = f"{size} columns are fewer than the ranks"
                continue
            fixed = self._made_by_site(operand, dim)
            placement = fixed or _one(operand, dim, blocks(size, ranks, _unit(operand, size, ranks)))
            problem = _Walk(self, {(node, operand): placement}, strict=True).run()
            if problem:
                self.because[node] = problem
            else:
                self.rows.add(node)

    def columns(self, edge: Edge, placement: Placement) -> str:
        """A wish that a linear layer's columns must fulfil; returns why not, or an empty string."""
        return _Walk(self, {edge: placement}, strict=True).run()

    def _made_by_site(self, operand: Node, dim: int) -> Placement | None:
        """The cut that a divided site's result has here, where views alone lie between."""
        path, node = [], operand
        while node not in self.fixed:
            form = self.forms.get(node)
            tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
            if form is None or form.sum is not None or len(tensors) != 1:
                return None
            path.append(node)
            node = tensors[0]
        placement = self.fixed[node]
        for user in reversed(path):
            placement = forward(self.forms[user], user, {node: placement})
            node = user
        return placement if placement[dim] is not None else None


class _Walk:
    """One walk, from the latest value back; its wishes count at the end, if it does.

    strict: every value on the way must be cut as it is wanted, until a linear layer, a divided site or weights are met
    """

    def __init__(self, wishes: Wishes, edges: Mapping[Edge, Placement], strict: bool):
        self.wishes, self.strict = wishes, strict
        self.edges: dict[Edge, Placement] = dict(edges)
        self.found: dict[Node, Placement] = {}
        self.useful = False
        self.queue: list[tuple[int, Node]] = []
        self.seen: set[Node] = set()
        for _, used in edges:
            self._push(used)

    def _push(self, node: Node) -> None:
        if node not in self.seen:
            self.seen.add(node)
            heapq.heappush(self.queue, (-self.wishes.order[node], node))

    def run(self) -> str:
        """Walk; returns why it ended where it should not have, or an empty string."""
        while self.queue:
            _, node = heapq.heappop(self.queue)
            problem = self._visit(node)
            if problem and self.strict:
                return problem
            if problem:
                self.wishes.stopped.setdefault(node, problem)
        if self.strict and not self.useful:
            return "what it reads is on all ranks"
        for node, placement in self.found.items():
            self.wishes.wanted[node] = placement
        return ""

    def _visit(self, node: Node) -> str:
        wishes = self.wishes
        if node in wishes.constants:
            return ""
        placement, problem = self._agreed(node)
        if placement is None:
            return problem
        if is_whole(placement):
            return ""
        if node in wishes.fixed:
            self.useful = self.useful or wishes.fixed[node] == placement
            return "" if wishes.fixed[node] == placement else f"{node.name} is divided in another way"
        if node in wishes.wanted and wishes.wanted[node] != placement:
            return f"{node.name} is cut in another way"
        form = wishes.forms.get(node)
        if form is None:
            return f"{target_name(node)} ({source_line(node)}) is not cut"
        back = backward(form, placement)
        if back is None:
            return f"{target_name(node)} ({source_line(node)}) cannot give a part of it"
        if wishes.is_linear(node):
            self.useful = True
        self.found[node] = placement
        for operand, own in back.items():
            if operand not in wishes.constants and not is_whole(own):
                self.edges[(node, operand)] = own
                self._push(operand)
        return ""

    def _agreed(self, node: Node) -> tuple[Placement | None, str]:
        """What all users want of a node."""
        asked: list[tuple[Node, Placement]] = []
        for user in node.users:
            want = self.edges.get((user, node)) or self._earlier(user, node)
            if want is None:
                return None, f"{node.name} is used whole by {target_name(user)} ({source_line(user)})"
            asked.append((user, want))
        more = sum(used is node for _, used in self.edges) - len(asked)
        kept = self.wishes.kept.get(node, 0)
        if kept and more < 1:
            return None, f"{node.name} is used whole"
        asked += [
            (user, want)
            for (user, used), want in self.edges.items()
            if used is node and user not in node.users
        ]
        first = asked[0][1]
        if all(want == first for _, want in asked):
            return first, ""
        return self._together(node, asked)

    def _earlier(self, user: Node, node: Node) -> Placement | None:
        """What a user wants by an earlier walk."""
        wanted, form = self.wishes.wanted.get(user), self.wishes.forms.get(user)
        if wanted is None or form is None:
            return None
        back = backward(form, wanted)
        own = None if back is None else back.get(node)
        return None if own is None or is_whole(own) else own

    def _together(self, node: Node, asked: list[tuple[Node, Placement]]) -> tuple[Placement | None, str]:
        """The cut that has what slices of one dimension want, each its own; in the order of the whole."""
        differing = f"{node.name} is wanted in parts that differ"
        dims = {dim for _, want in asked for dim, cut in enumerate(want) if cut is not None}
        if len(dims) != 1:
            return None, differing
        (dim,) = dims
        cuts = [cut for _, want in asked if (cut := want[dim]) is not None]
        if len(cuts) != len(asked):
            return None, differing
        union = cut_of(
            cuts[0].size, [_union(cut.indices(rank) for cut in cuts) for rank in range(len(cuts[0].ranks))]
        )
        merged = _one(node, dim, union)
        for user, want in asked:
            form = self.wishes.forms.get(user)
            ties = [] if form is None else form.ties_of(node)
            tie = next((tie for tie in ties if tie.source == (dim,) and isinstance(tie.how, Slice)), None)
            if tie is None or tie.forward(merged) is None or tie.forward(merged) != tie.forward(want):
                return None, differing
        return merged, ""


def _unit(operand: Node, size: int, ranks: int) -> int:
    """How many elements are cut together: 16 bytes, as kernels want rows aligned, where there are enough."""
    unit = 16 // max(operand.meta["val"].element_size(), 1)
    return unit if size % unit == 0 and size // unit >= ranks else 1


def _union(parts: Iterable[Indices]) -> Indices:
    import numpy as np

    return np.unique(np.concatenate(list(parts)))


def _one(node: Node, dim: int, cut: Cut | None) -> Placement:
    """The placement with one dimension cut."""
    found = list(whole(len(sizes(node))))
    found[dim] = cut
    return tuple(found)


def backward(form: Form, placement: Placement) -> dict[Node, Placement] | None:
    """What operands of a form must be for a result; None: no operands give it."""
    found: dict[Node, list[Cut | None]] = {}
    given: set[int] = set()
    for tie in form.ties:
        own = found.setdefault(tie.operand, list(whole(len(sizes(tie.operand)))))
        if all(placement[dim] is None for dim in tie.result):
            continue
        cuts = tie.backward(placement)
        if cuts is None:
            return None
        given.update(tie.result)
        for dim, cut in zip(tie.source, cuts, strict=True):
            own[dim] = cut
    if any(cut is not None and dim not in given for dim, cut in enumerate(placement)):
        return None
    return {operand: tuple(own) for operand, own in found.items()}


def forward(form: Form, node: Node, placements: Mapping[Node, Placement]) -> Placement:
    """What the ties of a form say of the result, where its operands have these placements.

    Dimensions that a tie cannot carry are not cut in the result: whoever asks has to see that the operand is whole.
    """
    found: list[Cut | None] = list(whole(len(sizes(node))))
    for tie in form.ties:
        if tie.operand not in placements:
            continue
        cuts = tie.forward(placements[tie.operand])
        for dim, cut in zip(tie.result, cuts or (), strict=False):
            if cut is not None:
                found[dim] = cut
    return tuple(found)
