"""Builds masks that are run again (`passes/detect/dynamic_mask.py`) in a cached graph.

New queries meet all slots there: what is of queries is there for the new tokens, what is of keys comes from buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.passes.detect.dynamic_mask import SIZED
from kvcompile.passes.graph import expr, shape, target_name, value
from kvcompile.passes.records import DynamicMask, KeySide, Leaf, PositionalPart, Side

aten = torch.ops.aten


class Builder:
    """Builds masks in a cached graph, for new queries over all slots; masks of several layers share parts.

    positions: [B, S] of the new tokens; span: how many slots there are; copied: nodes of the canonical graph -> theirs
    """

    def __init__(self, graph: Graph, positions: Node, span: Node, copied: Mapping[Node, Node]):
        self.graph, self.positions, self.span, self.copied = graph, positions, span, copied
        # By what runs over which side: one mask may be read with its queries as another's keys.
        self._done: dict[tuple[Node, tuple[Side, ...]], Node] = {}
        self._parts: dict[tuple[PositionalPart, int], Node] = {}

    def leaves(self, leaves: Sequence[Leaf], buffers: Sequence[Node]) -> list[Node]:
        """What an expression reads, at the graph's insertion point: for the new tokens, the slots, or both.

        buffers: [B, 1, slots, ..] for the key-side tensors that no earlier site keeps, in the order of `key_rows`
        """
        left = iter(buffers)
        for leaf in leaves:
            if leaf.kind == "key" and (leaf.node, _of_keys(leaf)) not in self._done:
                size = tuple(int(size) for dim, size in enumerate(shape(leaf.node)) if dim not in leaf.dims)
                self._done[leaf.node, _of_keys(leaf)] = self._rows(
                    KeySide(leaf.node, leaf.dims[0], leaf.dims[2], size), next(left)
                )
        found = []
        for leaf in leaves:
            match leaf.kind:
                case "table":
                    found.append(self.copied[leaf.node])
                    continue
                case "query":
                    node = self.copied[leaf.node]
                case "key":
                    node = self._done[leaf.node, _of_keys(leaf)]
                case "pair":
                    assert leaf.rerun is not None
                    node = self._build(leaf.rerun, left)
            order = leaf.order
            if leaf.kind == "pair" and leaf.dims[0] < 0:
                assert leaf.rerun is not None
                if not leaf.rerun.static:  # positions bring a batch along
                    node = self._call(aten.unsqueeze.default, node, 0)
                order = [0, *(dim + 1 for dim in order)]
            if order != list(range(len(order))):
                node = self._call(aten.permute.default, node, order)
            found.append(node)
        return found

    def _build(self, mask: DynamicMask, left: Iterator[Node]) -> Node:
        """Insert the subgraph of `mask`, over the new tokens and the slots."""
        parts = {part.node: part for part in mask.static}
        for side in mask.keys:
            if (side.node, mask.sides[side.node]) not in self._done:
                self._done[side.node, mask.sides[side.node]] = self._rows(side, next(left))
        for node in mask.region:
            if (node, _turn(node, mask)) in self._done:
                continue

            def operand(used: Node, node: Node = node) -> Node:
                return self._static(parts[used], node) if used in parts else self._operand(used, node, mask)

            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
            if target_name(node) in SIZED:
                args = self._sizes(node, args, mask)
            assert callable(node.target)
            new = self.graph.call_function(node.target, args, kwargs)
            new.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
            self._done[node, _turn(node, mask)] = new
        return self._done[mask.node, _turn(mask.node, mask)]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def _static(self, part: PositionalPart, user: Node) -> Node:
        """The part for the new tokens and the slots, in the dimensions that it has, or, where it has no batch, that of
        what uses it."""
        rank = len(shape(part.node))
        batch, heads, query, key = part.dims
        # Positions differ from sequence to sequence, so there is a batch, and it leads.
        more = 0 if batch == 0 else max(len(shape(user)) - rank, 1)
        if (part, more) not in self._parts:
            tables = [self.copied[table] for table in part.tables]
            made = self._call(ops.score_function, self.positions, self.span, tables, part.program, part.heads)
            # [B, heads, S, span] to the places that they have in the part
            wanted: list[int | None] = [None] * (rank + more)
            wanted[0] = 0
            wanted[query + more], wanted[key + more] = 2, 3
            if heads >= 0:
                wanted[heads + more] = 1
            order = [dim for dim in wanted if dim is not None]
            if heads < 0:
                made = self._call(aten.squeeze.dim, made, 1)
                order = [dim if dim == 0 else dim - 1 for dim in order]
            if order != sorted(order):
                made = self._call(aten.permute.default, made, order)
            for dim, source in enumerate(wanted):
                if source is None:
                    made = self._call(aten.unsqueeze.default, made, dim)
            self._parts[part, more] = made
        return self._parts[part, more]

    def _rows(self, side: KeySide, buffer: Node) -> Node:
        """Keep a key-side tensor's new rows and read all of them, the sequence in its own place."""
        rank = len(side.rest) + 2
        rest = [dim for dim in range(rank) if dim not in (side.batch, side.seq)]
        order = [side.batch, side.seq, *rest]
        rows = self._call(aten.permute.default, self.copied[side.node], order)
        kept = self._call(ops.cached_rows, rows, buffer, self.positions, self.span)
        return self._call(aten.permute.default, kept, [order.index(dim) for dim in range(rank)])

    def _operand(self, used: Node, node: Node, mask: DynamicMask) -> Node:
        if (node, used) in mask.positions:
            return self._of_slots(used) if mask.positions[node, used] == "key" else self.copied[used]
        if (used, _turn(used, mask)) in self._done:
            return self._done[used, _turn(used, mask)]
        if _grows(used) and target_name(node) == "topk":
            # How many are chosen, at most all: of the axis that they are chosen from.
            dim = node.args[2] if len(node.args) > 2 else -1
            source = node.args[0]
            assert isinstance(source, Node) and isinstance(dim, int)
            on_keys = source in mask.sides and mask.sides[source][dim] == "key"
            return self._number(used) if on_keys else self.copied[used]
        return self.copied[used]

    def _of_slots(self, used: Node) -> Node:
        """Positions, or what is computed from them alone, for all slots instead of the new tokens."""
        if isinstance(value(used), torch.SymInt):
            return self._number(used) if _grows(used) else self.copied[used]
        if used.op == "placeholder":
            if not shape(used):  # how many tokens stand before the new ones
                return self._call(aten.zeros_like.default, self.copied[used])
            return self._call(aten.unsqueeze.default, self._slots(used), 0)  # position_ids [B, S]
        if used.op == "get_attr" or not used.all_input_nodes:
            return self.copied[used]
        if target_name(used) == "arange":
            return self._slots(used)
        args, kwargs = torch.fx.map_arg((used.args, used.kwargs), self._of_slots)
        return self._call(used.target, *args, **kwargs)

    def _slots(self, like: Node) -> Node:
        val = like.meta["val"]
        return self._call(aten.arange.default, self.span, dtype=val.dtype, device=val.device)

    def _number(self, used: Node) -> Node:
        """An integer computed from S, for the number of slots instead."""
        if target_name(used) == "sym_size":
            return self.span
        args = torch.fx.map_arg(used.args, lambda n: self._number(n) if _grows(n) else self.copied[n])
        return self._call(used.target, *args, **used.kwargs)

    def _sizes(self, node: Node, args: Any, mask: DynamicMask) -> Any:
        """The size argument of a creator or a reshape: S is the number of new tokens or of slots, by its place."""
        place = 0 if isinstance(node.args[0], (list, tuple)) else 1
        old, new = node.args[place], list(args[place])
        assert isinstance(old, (list, tuple))
        for dim, size in enumerate(old):
            if isinstance(size, Node) and _grows(size):
                new[dim] = self.span if mask.sides[node][dim] == "key" else self.copied[size]
        return (*args[:place], new, *args[place + 1 :])


def _of_keys(leaf: Leaf) -> tuple[Side, ...]:
    """The sides of what is kept of each key's token."""
    return tuple("key" if dim == leaf.dims[2] else "" for dim in range(len(shape(leaf.node))))


def _turn(node: Node, mask: DynamicMask) -> tuple[Side, ...]:
    """Which side each dimension of a node runs over; of several results, those of its operand."""
    found = mask.sides.get(node, ())
    if not found and node.args and isinstance(node.args[0], Node):
        found = mask.sides.get(node.args[0], ())
    return found


def _grows(node: Node) -> bool:
    """Whether a node is an integer made of the sequence's length."""
    if not isinstance(value(node), torch.SymInt):
        return False
    ids = next(n for n in node.graph.nodes if n.op == "placeholder")
    return expr(shape(ids)[1]) in expr(value(node)).free_symbols
