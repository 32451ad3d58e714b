"""Masks and biases that depend on activations: sparse indexers, gates on keys (DeepSeek-V3.2, Doge).

Such a mask [.., S, S] is made from token-local tensors (an indexer's queries and keys, a gate of each value) by
operators that bring every query together with every key. With a cache the new queries must meet *all* keys, so
the subgraph is built again over (new tokens, slots):

    query-side tensors      as they are, for the new tokens
    key-side tensors        cached in a buffer of their own [B, slots, ..] and read in full
    causal or sliding parts from the positions of the new tokens

Which side a tensor is on follows from the alignment of dimensions (`passes.axes`), not from names. What cannot be
told apart is refused with the operator in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.kernels import ops
from kvcompile.passes import masks
from kvcompile.passes.axes import Axes, Axis, Unknown, is_pointwise
from kvcompile.passes.base import ancestors, expr, shape, target_name, value
from kvcompile.passes.evaluate import depends_on
from kvcompile.passes.probe import Prober, Refused
from kvcompile.types import DynamicMask, KeySide, MaskSpec, Side, StaticPart

aten = torch.ops.aten
_CREATE = ("new_zeros", "new_ones", "new_full", "new_empty", "zeros", "ones", "full")
_Values = tuple[float, float]  # shown, hidden
_SIZED = (*_CREATE, "expand", "view", "reshape", "_unsafe_view")


def find(mask: Node, prober: Prober, stop: Collection[Node] = ()) -> DynamicMask:
    """Take a mask apart; raises Refused with what is in the way.

    stop: results of other attention blocks, which are one value per token like any other

    The static parts are removed: the caller's own causal or sliding mask must hold besides.
    """
    if len(shape(mask)) != 4:
        raise Refused(f"the mask depends on activations and has {len(shape(mask))} dimensions, expected 4")
    behind = ancestors([mask], set(stop))
    order = [node for node in mask.graph.nodes if node in behind]
    tokens = {node for node in order if depends_on(node, ("input_ids",))}
    axes = Axes(prober.seq)
    region, parts = _region(order, tokens, axes, set(stop), prober)
    inside = {*region, *parts}
    axes.apart = {
        n
        for node in region
        for n in node.all_input_nodes
        if n not in inside and n not in tokens and axes.of(n)
    }
    try:
        for node in region:
            axes.visit(node)
    except Unknown as unknown:
        raise Refused(
            f"the mask depends on activations through {unknown}, which is not supported"
        ) from unknown
    query, key = axes.find(mask, 2), axes.find(mask, 3)
    if query == key:
        raise Refused("the mask depends on activations, and its queries cannot be told from its keys")
    queries, keys, static = _sources(region, parts, tokens, axes, query, key, prober)
    sides: dict[Axis, Side] = {query: "query", key: "key"}
    nodes = (*region, *queries, *(side.node for side in keys))
    found = DynamicMask(
        mask,
        tuple(region),
        queries,
        keys,
        static,
        {n: tuple(sides.get(axes.find(n, dim), "") for dim in range(len(shape(n)))) for n in nodes},
        {
            (n, used): _side_of_use(n, used, axes, sides)
            for n in region
            for used in n.all_input_nodes
            if used in axes.apart
        },
    )
    _check_causal(found, prober)
    return found


def _side_of_use(user: Node, used: Node, axes: Axes, sides: dict[Axis, Side]) -> Side:
    kinds = {sides.get(axes.find(used, dim, user), "") for dim in axes.of(used)}
    if len(kinds) != 1 or kinds == {""}:
        raise Refused(
            f"the mask depends on positions in {user.name}, and it is not clear whether of queries or of keys"
        )
    return kinds.pop()


def _region(
    order: list[Node], tokens: set[Node], axes: Axes, stop: set[Node], prober: Prober
) -> tuple[list[Node], dict[Node, _Values]]:
    """The nodes to build again, and the parts [.., S, S] that have two values and depend on positions alone.

    In the region are nodes over both axes that depend on the tokens, what is computed from them, and positions
    over both axes with more values than shown and hidden (distances).
    """
    inside: set[Node] = set()
    for node in order:
        if node in stop or node not in tokens or node.op != "call_function":
            continue
        if len(axes.of(node)) > 1 or any(source in inside for source in node.all_input_nodes):
            inside.add(node)
    parts: dict[Node, _Values] = {}
    waiting = [source for node in inside for source in node.all_input_nodes if source not in inside]
    while waiting:
        node = waiting.pop()
        if node in inside or node in parts or node in tokens or len(axes.of(node)) < 2:
            continue
        values = None if target_name(node) in _CREATE else _two_values(node, prober)
        if values is not None:
            parts[node] = values
        else:
            inside.add(node)
            waiting.extend(node.all_input_nodes)
    return [node for node in order if node in inside], parts


def _two_values(node: Node, prober: Prober) -> _Values | None:
    """What a part holds for a key that is shown and one that is hidden, if it holds just two values."""
    found: Tensor = prober.run([node], 2, 29)[0].double()
    first, last = [0] * found.dim(), [0] * found.dim()
    for dim, size in enumerate(found.shape):
        if size == 29:
            last[dim] = 28
    dims = [dim for dim, size in enumerate(found.shape) if size == 29]
    first[dims[-1]] = 28
    shown, hidden = float(found[tuple(last)]), float(found[tuple(first)])
    if shown == hidden or not bool(((found == shown) | (found == hidden)).all()):
        return None
    return shown, hidden


def _sources(
    region: list[Node],
    parts: dict[Node, _Values],
    tokens: set[Node],
    axes: Axes,
    query: Any,
    key: Any,
    prober: Prober,
) -> tuple[tuple[Node, ...], tuple[KeySide, ...], tuple[StaticPart, ...]]:
    inside = set(region)
    queries: list[Node] = []
    keys: list[KeySide] = []
    static: list[StaticPart] = []
    for source in dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside):
        if source in parts:
            users = [user for user in source.users if user in inside]
            static.append(_static(source, users, parts[source], axes, query, key, prober))
            continue
        if source in axes.apart or not shape(source):
            continue
        if not axes.of(source):
            if source in tokens:
                raise Refused(f"the mask depends on {source.name}, computed from the tokens as a whole")
            continue
        kinds = {axes.find(source, dim) for dim in axes.of(source)}
        if kinds == {query}:
            queries.append(source)
        elif kinds == {key}:
            sizes = [expr(size) for size in shape(source)]
            batches = [dim for dim, size in enumerate(sizes) if size == prober.batch]
            if len(batches) != 1:
                raise Refused(
                    f"the mask depends on {source.name} of shape {shape(source)}: no batch dimension"
                )
            row = axes.of(source)[0]
            if any(not size.is_Integer for dim, size in enumerate(sizes) if dim not in (batches[0], row)):
                raise Refused(
                    f"the mask depends on {source.name} of shape {shape(source)}: not one size per token"
                )
            rest = tuple(int(size) for dim, size in enumerate(sizes) if dim not in (batches[0], row))
            keys.append(KeySide(source, batches[0], row, rest))
        else:
            raise Refused(
                f"the mask depends on {source.name}, and it is not clear whether of queries or of keys"
            )
    return tuple(queries), tuple(keys), tuple(static)


def _static(
    node: Node, users: list[Node], values: _Values, axes: Axes, query: Any, key: Any, prober: Prober
) -> StaticPart:
    """Classify a [.., S, S] part that no token decides."""
    dims = axes.of(node)
    kinds = [axes.find(node, dim) for dim in dims]
    if sorted(kinds, key=str) != sorted([query, key], key=str):
        raise Refused(f"the mask has a part {node.name} of shape {shape(node)}, expected queries and keys")
    if (
        len(shape(node)) < 4
        and expr(shape(node)[0]) != prober.batch
        and not all(
            is_pointwise(user) and len(shape(user)) > 2 and expr(shape(user)[0]) == prober.batch
            for user in users
        )
    ):
        raise Refused(f"the mask has a part {node.name} of shape {shape(node)}, expected [batch, .., S, S]")
    rows, columns = dims[kinds.index(query)], dims[kinds.index(key)]

    def pattern(seq: int, constant: Callable[[int], int] | None) -> Tensor:
        out: Tensor = prober.run([node], 2, seq, None, 0, constant)[0]
        flat = out.movedim((rows, columns), (-2, -1)).double().reshape(-1, seq, seq) == values[0]
        if not bool((flat == flat[:1]).all()):
            raise Refused(f"the mask has a part {node.name} that differs between sequences or heads")
        return flat[0]

    mask = masks.classify(prober, pattern, ancestors([node]), 2, pattern(29, None))
    if mask.kind not in ("causal", "sliding"):
        raise Refused(f"the mask has a part {node.name} that is {mask}, expected causal or sliding")
    return StaticPart(node, rows, columns, mask, *values)


def _check_causal(found: DynamicMask, prober: Prober) -> None:
    """What later tokens hold must not change a query's row: a cache does not have them yet."""
    size, changed = 13, 8
    generator = torch.Generator().manual_seed(0)
    values: dict[Node, Any] = {}
    for node in found.sources:
        drawn = torch.randn(prober.concrete(node, 2, size), generator=generator)
        values[node] = drawn.to(prober.device, node.meta["val"].dtype)
    for part in found.static:
        values[part.node] = prober.run([part.node], 2, size)[0]
    before: Tensor = prober.run([found.node], 2, size, dict(values))[0]
    for side in found.keys:
        other = values[side.node].clone()
        other.narrow(side.seq, changed, size - changed).add_(1.0)
        values[side.node] = other
    shown = before if before.dtype == torch.bool else before > before.amax(-1, keepdim=True) - 1000
    future = shown.triu(1).any()
    if future:
        raise Refused(
            "the mask depends on activations and shows the future: later keys, which a cache does not have"
        )
    after: Tensor = prober.run([found.node], 2, size, dict(values))[0]
    if not torch.equal(before[..., :changed, :changed], after[..., :changed, :changed]):
        raise Refused(
            "the mask of a query depends on activations of later tokens, which a cache does not have"
        )


class Builder:
    """Builds masks in a cached graph, for new queries over all slots; masks of several layers share parts.

    positions: [B, S] of the new tokens; span: how many slots there are; copied: nodes of the canonical graph -> theirs
    """

    def __init__(self, graph: Graph, positions: Node, span: Node, copied: Mapping[Node, Node]):
        self.graph, self.positions, self.span, self.copied = graph, positions, span, copied
        self._done: dict[Node, Node] = {}
        self._visible: dict[MaskSpec, Node] = {}
        self._parts: dict[tuple[StaticPart, int], Node] = {}

    def build(self, mask: DynamicMask, buffers: Sequence[Node]) -> Node:
        """Insert the subgraph of `mask` at the graph's insertion point: [B or 1, H or 1, new tokens, slots].

        buffers: [B, 1, slots, ..] for its key-side tensors that no earlier mask keeps, in their order
        """
        left = iter(buffers)
        parts = {part.node: part for part in mask.static}
        for side in mask.keys:
            if side.node not in self._done:
                self._done[side.node] = self._rows(side, next(left))
        for node in mask.region:
            if node in self._done:
                continue

            def operand(used: Node, node: Node = node) -> Node:
                return self._static(parts[used], node) if used in parts else self._operand(used, node, mask)

            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
            if target_name(node) in _SIZED:
                args = self._sizes(node, args, mask)
            assert callable(node.target)
            new = self.graph.call_function(node.target, args, kwargs)
            new.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
            self._done[node] = new
        return self._done[mask.node]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def _static(self, part: StaticPart, user: Node) -> Node:
        """What the part's mask shows [B, new tokens, slots], in the values of the part and the dimensions that it has,
        or, where it has no batch, that of what uses it."""
        val = part.node.meta["val"]
        rank = val.dim()
        query, key = part.query, part.key
        if rank < 3:
            more = len(shape(user)) - rank
            rank, query, key = rank + more, query + more, key + more
        if (part, rank) not in self._parts:
            new = self._shown(part.mask, val.device)
            if query > key:
                new = self._call(aten.transpose.int, new, 1, 2)
            for dim in range(1, rank):  # the batch leads
                if dim not in (query, key):
                    new = self._call(aten.unsqueeze.default, new, dim)
            if val.dtype != torch.bool:
                shown, hidden = (
                    self._call(aten.full.default, [], amount, dtype=val.dtype, device=val.device)
                    for amount in (part.shown, part.hidden)
                )
                new = self._call(aten.where.self, new, shown, hidden)
            elif not part.shown:
                new = self._call(aten.bitwise_not.default, new)
            self._parts[part, rank] = new
        return self._parts[part, rank]

    def _shown(self, mask: MaskSpec, device: torch.device) -> Node:
        if mask not in self._visible:
            key = self._call(aten.arange.default, self.span, device=device)
            query = self._call(aten.unsqueeze.default, self.positions, 2)
            seen = self._call(aten.le.Tensor, key, query)
            if mask.window is not None:
                first = self._call(aten.sub.Tensor, query, mask.window)
                seen = self._call(aten.bitwise_and.Tensor, seen, self._call(aten.gt.Tensor, key, first))
            self._visible[mask] = seen
        return self._visible[mask]

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
        if used in self._done:
            return self._done[used]
        if _grows(used):
            # A number made of S that is no size of the result, e.g. the k of a topk: that of the axis it works on.
            dim = node.args[2] if target_name(node) == "topk" and len(node.args) > 2 else -1
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


def _grows(node: Node) -> bool:
    """Whether a node is an integer made of the sequence's length."""
    if not isinstance(value(node), torch.SymInt):
        return False
    ids = next(n for n in node.graph.nodes if n.op == "placeholder")
    return expr(shape(ids)[1]) in expr(value(node)).free_symbols
