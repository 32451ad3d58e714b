"""Build: the ranks' graphs, node by node, each value with the placement that its operands prove.

An operator runs on cut operands where its form (`forms/`) says that the result is then cut so; everything else gets
whole operands. What is cut and needed whole is gathered; what is whole and needed cut is sliced, and of weights only
that slice is held. Sums over what is cut are added over the ranks, and what is added to the sum (a bias) after that.

All ranks have the same nodes in the same order: only sizes, slices and weights differ. So `verify` can run them in
step, and collectives meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from kvcompile.passes.graph import expr, shape
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.shard import collectives
from kvcompile.passes.shard.cuts import Cut, Placement, covers, is_whole, local_shape, together, whole
from kvcompile.passes.shard.form import Form, Where, sizes
from kvcompile.passes.shard.ties import strided
from kvcompile.passes.shard.wishes import Wishes, backward, forward

aten = torch.ops.aten
Local = tuple[Node, ...]  # a value's nodes, one for each rank


@dataclass(frozen=True)
class Piece:
    """A weight as a rank has it: the whole one's name, and which part."""

    path: str
    placement: Placement


@dataclass
class Built:
    """The ranks' graphs without modules, and what they read.

    pieces: by name in the ranks' graphs; made: index tensors that the build made, by name and rank
    moved:  gathers and sums, each as what it is and where
    """

    graphs: tuple[Graph, ...]
    pieces: dict[str, Piece] = field(default_factory=dict)
    made: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    moved: list[tuple[str, Node]] = field(default_factory=list)
    rows: set[Node] = field(default_factory=set)
    columns: set[Node] = field(default_factory=set)


class Builder:
    """Builds the graphs of all ranks from one."""

    def __init__(self, module: GraphModule, ranks: int, forms: Mapping[Node, Form], wishes: Wishes):
        self.module, self.ranks, self.forms, self.wishes = module, ranks, forms, wishes
        self.built = Built(tuple(Graph() for _ in range(ranks)))
        self.natural: dict[Node, Placement] = {}
        self.values: dict[tuple[Node, Placement], Local] = {}
        self.numbers: dict[Node, int] = {}  # sizes that are fixed
        self.fakes: dict[tuple[int, tuple[int | None, ...]], Tensor] = {}

    def whole(self, node: Node) -> Local:
        """A value as all ranks have it whole."""
        return self.get(node, whole(len(shape(node))))

    def get(self, node: Node, placement: Placement) -> Local:
        """A value in a placement, brought there from the one in which it was computed."""
        found = self.values.get((node, placement))
        if found is not None:
            return found
        if node in self.wishes.constants:
            found = self._constant(node, placement)
        else:
            natural = self.natural[node]
            own = self.values[(node, natural)]
            if natural == placement:
                return own
            if not is_whole(natural):
                own = self._gather(node, natural, own)
            found = own if is_whole(placement) else self._slice(node, placement, own)
        self.values[(node, placement)] = found
        return found

    # --- nodes of the whole graph ---

    def copy(self, node: Node) -> None:
        """A placeholder, or the output."""
        if node.op == "output":
            for rank, graph in enumerate(self.built.graphs):
                graph.output(map_arg(node.args[0], lambda used: self._operand(used, rank)))  # noqa: B023
            return
        made = tuple(graph.node_copy(node) for graph in self.built.graphs)
        self._give(node, whole(len(shape(node))), made)

    def call(self, node: Node) -> None:
        """A call of the whole graph: cut where its form says so, else whole."""
        if node in self.wishes.constants:
            return  # made where it is wanted
        if node.target is aten.sym_size.int and _fixed(node) is not None:
            self.numbers[node] = _fixed(node)  # type: ignore[assignment]
            return
        form = self.forms.get(node)
        if form is None:
            self._emit(node, {}, whole(len(shape(node))))
            return
        if self._by_rows(node, form):
            return
        result = self._result(node, form)
        operands = {} if is_whole(result) else backward(form, result)
        if operands is None or not covers(result) or forward(form, node, operands) != result:
            result, operands = whole(len(result)), {}
        if not is_whole(result):
            operands = {each: self._as_it_is(form, each, own, result) for each, own in operands.items()}
        if not is_whole(result) and self.wishes.is_linear(node):
            self.built.columns.add(node)
        self._emit(node, operands, result, form)

    def _as_it_is(self, form: Form, operand: Node, wanted: Placement, result: Placement) -> Placement:
        """The placement that an operand has, where it gives the result as well as the wanted one does."""
        natural = self.natural.get(operand)
        if natural is None or natural == wanted:
            return wanted
        ties = form.ties_of(operand)
        tied = {dim for tie in ties for dim in tie.source}
        if any(cut is not None and dim not in tied for dim, cut in enumerate(natural)):
            return wanted
        for tie in ties:
            if tie.forward(natural) != tuple(result[dim] for dim in tie.result):
                return wanted
        return natural

    def attend(self, node: Node, operands: Mapping[Node, Placement], result: Placement) -> None:
        """An attention site on the heads of each rank."""
        self._emit(node, dict(operands), result)

    def _result(self, node: Node, form: Form) -> Placement:
        """What a call should give: what is wished for, where an operand has it or weights can be cut so; else what all
        of its operands have."""
        wish = self.wishes.wanted.get(node)
        computed = [each for each in dict.fromkeys(tie.operand for tie in form.ties) if each in self.natural]
        cut = [each for each in computed if not is_whole(self.natural[each])]
        if wish is not None and (cut or self.wishes.is_linear(node)):
            return wish
        if not cut:
            return whole(len(sizes(node)))
        implied = forward(form, node, {each: self.natural[each] for each in cut})
        for each in computed:
            own = forward(form, node, {each: self.natural[each]})
            tied = {dim for tie in form.ties_of(each) for dim in tie.result}
            if any(implied[dim] != own[dim] for dim in tied):
                return whole(len(implied))
        return implied

    def _by_rows(self, node: Node, form: Form) -> bool:
        """A product whose operands are cut where it sums: each rank has a part of the sum."""
        summed = form.sum
        if summed is None or node in self.wishes.wanted:
            return False
        sides = ((summed.left, summed.left_dim), (summed.right, summed.right_dim))
        cuts = [self.natural[each][dim] if each in self.natural else None for each, dim in sides]
        cut = next((cut for cut in cuts if cut is not None), None)
        if cut is None or not cut.exact:
            return False
        for (each, dim), own in zip(sides, cuts, strict=True):
            others = [c for d, c in enumerate(self.natural.get(each, ())) if d != dim and c is not None]
            if others or (own != cut and each in self.natural) or sizes(each)[dim] != cut.size:
                return False
        operands = {}
        for each, dim in sides:
            placement = list(whole(len(sizes(each))))
            placement[dim] = cut
            operands[each] = tuple(placement)
        result = whole(len(sizes(node)))
        target, given = (node.target, node.args) if form.bare is None else form.bare
        locals_ = []
        for rank, graph in enumerate(self.built.graphs):
            args = [self._operand(each, rank, operands) for each in given]
            part = graph.call_function(target, tuple(args))  # type: ignore[arg-type]
            self._describe(part, node, result, rank)
            locals_.append(self._described(collectives.add_over_ranks(graph, part), node, rank))
        if form.added is not None:
            added = self.whole(form.added)
            locals_ = [
                self._described(graph.call_function(aten.add.Tensor, (total, bias)), node, rank)
                for rank, (graph, total, bias) in enumerate(
                    zip(self.built.graphs, locals_, added, strict=True)
                )
            ]
        self.built.moved.append(("sum", node))
        self.built.rows.add(node)
        self._give(node, result, tuple(locals_))
        return True

    def _emit(
        self, node: Node, operands: Mapping[Node, Placement], result: Placement, form: Form | None = None
    ) -> None:
        made = self._calls(node, operands, result, form)
        self._give(node, result, made)

    def _calls(
        self, node: Node, operands: Mapping[Node, Placement], result: Placement, form: Form | None
    ) -> Local:
        for used in node.all_input_nodes:  # all ranks' nodes of one operand, before those of the next
            if used not in self.numbers:
                self.get(used, operands.get(used) or whole(len(shape(used))))
        made = []
        for rank, graph in enumerate(self.built.graphs):
            args = [self._operand(each, rank, operands) for each in node.args]
            kwargs = {name: self._operand(each, rank, operands) for name, each in node.kwargs.items()}
            if form is not None and form.rewrite is not None and not is_whole_call(operands, result):
                everything = {
                    used: operands.get(used) or whole(len(shape(used))) for used in node.all_input_nodes
                }
                form.rewrite(Where(rank, everything, result), args, kwargs)
            new = graph.create_node("call_function", node.target, tuple(args), kwargs)
            self._describe(new, node, result, rank)
            made.append(new)
        return tuple(made)

    def _operand(self, value: Any, rank: int, operands: Mapping[Node, Placement] | None = None) -> Any:
        def local(used: Node) -> Any:
            if used in self.numbers:
                return self.numbers[used]
            placement = (operands or {}).get(used) or whole(len(shape(used)))
            return self.get(used, placement)[rank]

        return map_arg(value, local)

    def _give(self, node: Node, placement: Placement, made: Local) -> None:
        self.natural[node] = placement
        self.values[(node, placement)] = made

    # --- weights ---

    def _constant(self, node: Node, placement: Placement) -> Local:
        """What weights alone decide: of a cut one, from weights that are cut as far as its operators can be."""
        if node.op == "get_attr":
            return self._weight(node, placement)
        form = self.forms.get(node)
        if is_whole(placement):
            return self._calls(node, {}, placement, None)
        operands = None if form is None else backward(form, placement)
        if form is not None and operands is not None and forward(form, node, operands) == placement:
            return self._calls(node, operands, placement, form)
        return self._slice(node, placement, self.whole(node))

    def _weight(self, node: Node, placement: Placement) -> Local:
        path = str(node.target)
        name = path
        if not is_whole(placement):
            taken = sum(
                piece.path == path and not is_whole(piece.placement) for piece in self.built.pieces.values()
            )
            name = f"{path.replace('.', '_')}_part_{taken}"
        self.built.pieces[name] = Piece(path, placement)
        made = []
        for rank, graph in enumerate(self.built.graphs):
            new = graph.create_node("get_attr", name)
            self._describe(new, node, placement, rank)
            made.append(new)
        return tuple(made)

    def _index(self, tensors: Sequence[Tensor]) -> Local:
        """Index tensors, one for each rank, in all graphs."""
        name = f"shard_index_{len(self.built.made)}"
        self.built.made[name] = tuple(tensors)
        return tuple(graph.create_node("get_attr", name) for graph in self.built.graphs)

    # --- from one placement to another ---

    def _slice(self, node: Node, placement: Placement, own: Local) -> Local:
        """Of a whole value the part of each rank, dimension by dimension."""
        done = list(whole(len(placement)))
        for dim, cut in enumerate(placement):
            if cut is None:
                continue
            done[dim] = cut
            places = [strided(cut.indices(rank)) for rank in range(self.ranks)]
            made = []
            if all(place is not None for place in places):
                for graph, value, place in zip(self.built.graphs, own, places, strict=True):
                    assert place is not None
                    made.append(graph.call_function(aten.slice.Tensor, (value, dim, *place)))
            else:
                index = self._index([self._tensor(cut.indices(rank), node) for rank in range(self.ranks)])
                for graph, value, at in zip(self.built.graphs, own, index, strict=True):
                    made.append(graph.call_function(aten.index_select.default, (value, dim, at)))
            for rank, new in enumerate(made):
                self._describe(new, node, tuple(done), rank)
            own = tuple(made)
        return own

    def _gather(self, node: Node, placement: Placement, own: Local) -> Local:
        """A cut value made whole on all ranks: of an index that several have, that of the first."""
        self.built.moved.append(("gather", node))
        cut = together(placement)
        assert cut is not None, "what is whole is not gathered"
        dims = [dim for dim, own_cut in enumerate(placement) if own_cut is not None]
        if len(dims) == 1:
            own = self._gather_one(node, dims[0], cut, own)
        else:
            own = self._gather_several(node, dims, cut, own)
        for rank, new in enumerate(own):
            self._describe(new, node, whole(len(placement)), rank)
        return own

    def _gather_several(self, node: Node, dims: list[int], cut: Cut, own: Local) -> Local:
        """What is cut in several dimensions: these become the first one, which is cut."""
        rank_of = len(shape(node))
        order = [*dims, *(dim for dim in range(rank_of) if dim not in dims)]
        sizes_ = [sizes(node)[dim] for dim in dims]
        made = []
        for graph, value in zip(self.built.graphs, own, strict=True):
            moved = graph.call_function(aten.permute.default, (value, order))
            made.append(graph.call_function(aten.flatten.using_ints, (moved, 0, len(dims) - 1)))
        made = list(self._gather_one(node, 0, cut, tuple(made)))
        back = [order.index(dim) for dim in range(rank_of)]
        for rank, (graph, value) in enumerate(zip(self.built.graphs, made, strict=True)):
            apart = graph.call_function(aten.unflatten.int, (value, 0, sizes_))
            made[rank] = graph.call_function(aten.permute.default, (apart, back))
        return tuple(made)

    def _gather_one(self, node: Node, dim: int, cut: Cut, own: Local) -> Local:
        most = max(cut.counts)
        if min(cut.counts) < most:  # all ranks give as much: the last index again
            kept = [np.minimum(np.arange(most), cut.count(rank) - 1) for rank in range(self.ranks)]
            index = self._index([self._tensor(each, node) for each in kept])
            own = tuple(
                graph.call_function(aten.index_select.default, (value, dim, at))
                for graph, value, at in zip(self.built.graphs, own, index, strict=True)
            )
        made = []
        for graph, value in zip(self.built.graphs, own, strict=True):
            first = graph.call_function(aten.transpose.int, (value, 0, dim))
            first = graph.call_function(aten.contiguous.default, (first,))
            found = collectives.gather(graph, first, self.ranks)
            made.append(graph.call_function(aten.transpose.int, (found, 0, dim)))
        places = np.full(cut.size, -1, np.int64)
        for rank in reversed(range(self.ranks)):
            places[cut.indices(rank)] = rank * most + np.arange(cut.count(rank))
        assert (places >= 0).all(), "every index is on some rank"
        if len(places) == self.ranks * most and bool((places == np.arange(len(places))).all()):
            return tuple(made)
        index = self._index([self._tensor(places, node)] * self.ranks)
        return tuple(
            graph.call_function(aten.index_select.default, (value, dim, at))
            for graph, value, at in zip(self.built.graphs, made, index, strict=True)
        )

    def _tensor(self, indices: Any, like: Node) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(indices)).to(like.meta["val"].device)

    # --- what nodes say of themselves ---

    def _described(self, new: Node, node: Node, rank: int) -> Node:
        self._describe(new, node, whole(len(shape(node))), rank)
        return new

    def _describe(self, new: Node, node: Node, placement: Placement, rank: int) -> None:
        new.meta.update({name: item for name, item in node.meta.items() if name != "val"})
        val = node.meta.get("val")
        if isinstance(val, Tensor) and not is_whole(placement):
            val = self._fake(val, placement, rank)
        if val is not None:
            new.meta["val"] = val

    def _fake(self, val: Tensor, placement: Placement, rank: int) -> Tensor:
        """A fake tensor of a rank's sizes; ranks that have as much share it."""
        key = (id(val), tuple(None if cut is None else cut.count(rank) for cut in placement))
        if key not in self.fakes:
            sizes_: Any = local_shape(val.shape, placement, rank)
            with val.fake_mode:  # type: ignore[attr-defined]
                self.fakes[key] = torch.empty(sizes_, dtype=val.dtype, device=val.device)
        return self.fakes[key]


def is_whole_call(operands: Mapping[Node, Placement], result: Placement) -> bool:
    """Whether nothing of a call is cut."""
    return is_whole(result) and all(map(is_whole, operands.values()))


def _fixed(node: Node) -> int | None:
    """A size that is a number."""
    val = node.meta.get("val")
    if isinstance(val, int):
        return val
    found = expr(val) if val is not None else None
    return int(found) if found is not None and found.is_Integer else None


def tensor_of(module: GraphModule, piece: Piece, rank: int) -> Tensor:
    """A rank's part of a weight: a view where it is one run of indices, which takes no memory of its own."""
    value = fetch_attr(module, piece.path).detach()
    for dim, cut in enumerate(piece.placement):
        if cut is None:
            continue
        runs = cut.ranks[rank]
        if len(runs) == 1:
            value = value.narrow(dim, runs[0][0], runs[0][1] - runs[0][0])
        else:
            parts = [value.narrow(dim, start, stop - start) for start, stop in runs]
            value = torch.cat(parts, dim)
    assert isinstance(value, Tensor)
    return value
