"""What is computed for pairs of tokens and cannot be carried as an expression: sparse indexers (DeepSeek-V3.2).

Such a mask [.., S, S] is made from token-local tensors (an indexer's queries and keys, a gate of each value) by
operators that bring every query together with every key. With a cache the new queries must meet *all* keys, so
the subgraph is built again over (new tokens, slots):

    query-side tensors      as they are, for the new tokens
    key-side tensors        cached in a buffer of their own [B, slots, ..] and read in full
    parts of positions      from their expression (`passes/score_mod`), at the positions of the new tokens and the slots

Which side a tensor is on follows from the alignment of dimensions (`query_key_dims.py`), not from names. What cannot be
told apart is refused with the operator in the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from kvcompile.expression import B, Expr, H, K, Q, ScoreMod, const, integer, program
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.passes.detect.query_key_dims import REDUCE, Axes, Axis, Unknown, is_pointwise
from kvcompile.passes.graph import ancestors, expr, shape, source_line, target_name, value
from kvcompile.passes.probe.evaluate import depends_on
from kvcompile.passes.probe.probe import Prober, Refused
from kvcompile.passes.records import DynamicMask, KeySide, Leaf, PositionalPart, Side
from kvcompile.passes.score_mod.leaves import LeafRef, Untranslatable
from kvcompile.passes.score_mod.make import cast, lt, make
from kvcompile.passes.score_mod.normal_form import NoNormalForm, normal_form

aten = torch.ops.aten
_CREATE = ("new_zeros", "new_ones", "new_full", "new_empty", "zeros", "ones", "full")
_SIZED = (*_CREATE, "expand", "view", "reshape", "_unsafe_view")


def find(mask: Node, dims: tuple[int, int, int], prober: Prober) -> DynamicMask:
    """Take apart what is computed for pairs of tokens; raises Refused with what is in the way.

    dims: its dimensions of the batch (-1: none), of queries and of keys
    """
    if (mask, dims) in prober.memo:  # turned round, it is another mask
        known = prober.memo[mask, dims]
        if isinstance(known, Refused):
            raise known
        assert isinstance(known, DynamicMask)
        return known
    try:
        found = _find(mask, dims, prober)
    except Refused as refused:
        prober.memo[mask, dims] = refused
        raise
    prober.memo[mask, dims] = found
    return found


def _find(mask: Node, dims: tuple[int, int, int], prober: Prober) -> DynamicMask:
    stop = set(prober.dependence.cuts)
    behind = ancestors([mask], stop)
    order = [node for node in mask.graph.nodes if node in behind]
    tokens = {node for node in order if depends_on(node, ("input_ids",))}
    axes = Axes(prober.seq)
    region, parts = _region(order, tokens, axes, stop)
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
    query, key = axes.find(mask, dims[1]), axes.find(mask, dims[2])
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
    _check_local(found, prober)
    _check_numbers(found, axes, prober)
    _check_batch(found, prober)
    _check_past(found, axes, query, key, prober)
    return found


def _side_of_use(user: Node, used: Node, axes: Axes, sides: dict[Axis, Side]) -> Side:
    kinds = {sides.get(axes.find(used, dim, user), "") for dim in axes.of(used)}
    if len(kinds) != 1 or kinds == {""}:
        raise Refused(
            f"the mask depends on positions in {user.name}, and it is not clear whether of queries or of keys"
        )
    return kinds.pop()


def _region(
    order: list[Node], tokens: set[Node], axes: Axes, stop: set[Node]
) -> tuple[list[Node], list[Node]]:
    """The nodes to build again, and the parts over queries and keys that positions alone decide."""
    inside: set[Node] = set()
    for node in order:
        if node in stop or node not in tokens or node.op != "call_function":
            continue
        if len(axes.of(node)) > 1 or any(source in inside for source in node.all_input_nodes):
            inside.add(node)
    if (
        not inside
    ):  # of positions alone: the last operator is built again, and its operands are what it is made of
        inside.add(order[-1])
    parts: list[Node] = []
    waiting = [source for node in inside for source in node.all_input_nodes if source not in inside]
    while waiting:
        node = waiting.pop()
        if node in inside or node in parts or node in tokens or len(axes.of(node)) < 2:
            continue
        if target_name(node) in _CREATE:  # its sizes say which side is which
            inside.add(node)
            waiting.extend(node.all_input_nodes)
        else:
            parts.append(node)
    return [node for node in order if node in inside], parts


def _sources(
    region: list[Node],
    parts: list[Node],
    tokens: set[Node],
    axes: Axes,
    query: Any,
    key: Any,
    prober: Prober,
) -> tuple[tuple[Node, ...], tuple[KeySide, ...], tuple[PositionalPart, ...]]:
    inside = set(region)
    queries: list[Node] = []
    keys: list[KeySide] = []
    static: list[PositionalPart] = []
    for source in dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside):
        if source in parts:
            static.append(_static(source, axes, query, key, prober))
            continue
        if source in axes.apart or not isinstance(value(source), torch.Tensor):
            continue
        if not axes.of(source):
            if source in tokens:
                raise Refused(f"the mask depends on {source.name}, computed from the tokens as a whole")
            if not prober.dependence.is_constant(source):
                raise Refused(
                    f"the mask depends on {source.name}, which changes with the length of the sequence"
                )
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


def _static(node: Node, axes: Axes, query: Any, key: Any, prober: Prober) -> PositionalPart:
    """A part over queries and keys that no token decides, as an expression of positions; raises Refused."""
    sizes = [expr(size) for size in shape(node)]
    kinds = {dim: axes.find(node, dim) for dim in axes.of(node)}
    rows = [dim for dim, kind in kinds.items() if kind == query]
    columns = [dim for dim, kind in kinds.items() if kind == key]
    rest = [dim for dim, size in enumerate(sizes) if dim not in kinds and size not in (1, prober.batch)]
    batch = [dim for dim, size in enumerate(sizes) if size == prober.batch]
    if len(rows) != 1 or len(columns) != 1 or len(rest) > 1 or len(batch) > 1 or len(kinds) != 2:
        raise Refused(f"the mask has a part {node.name} of shape {shape(node)}, expected queries and keys")
    heads = int(sizes[rest[0]]) if rest else 1
    named = {rows[0]: Q, columns[0]: K} | dict.fromkeys(rest, H) | dict.fromkeys(batch, B)
    places = tuple(named.get(dim, integer(0)) for dim in range(len(sizes)))
    try:
        found = prober.reader.translator(heads).element(node, places)
    except Untranslatable as end:
        raise Refused(f"the mask has a part {node.name} that is not read: {end}") from end
    if found.names & {"n", "nb", "b", "query", "key", "pair", "reduction"}:
        raise Refused(f"the mask has a part {node.name} that depends on more than positions")
    tables: list[LeafRef] = []

    def number(leaf: LeafRef) -> int:
        if leaf not in tables:
            tables.append(leaf)
        return tables.index(leaf)

    instructions, numbers = program({"score": found}, number)
    mod = ScoreMod(instructions, tuple(leaf.kind for leaf in tables), numbers["score"])
    return PositionalPart(
        node,
        (batch[0] if batch else -1, rest[0] if rest else -1, rows[0], columns[0]),
        heads,
        json.dumps(mod.to_dict()),
        tuple(leaf.node for leaf in tables),
    )


def _check_local(found: DynamicMask, prober: Prober) -> None:
    """Raises Refused unless what the mask takes of tokens is computed of each token alone."""
    for node in found.sources:
        if not prober.dependence.is_local(node):
            miss = prober.dependence.problem([node])
            raise Refused(
                f"the mask depends on {node.name}, which is not computed of each token alone"
                + (f": {miss.reason}" if miss else "")
            )


def _of_length(node: Node, prober: Prober) -> bool:
    """Whether a node is a number (no tensor) that the sequence's length enters."""
    number = value(node)
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return prober.seq in number.node.expr.free_symbols
    return False


def _check_batch(found: DynamicMask, prober: Prober) -> None:
    """Raises Refused where a part of positions, which has a batch in a cache, would give one where none is expected."""
    inside = set(found.region)
    for part in found.static:
        if part.dims[0] == 0:
            continue
        for user in part.node.users:
            if user not in inside:
                continue
            batched = len(shape(user)) > 2 and expr(shape(user)[0]) == prober.batch
            if not is_pointwise(user) or not (batched or user is found.node):
                raise Refused(
                    f"the mask has a part {part.node.name} without a batch in {user.target} ({source_line(user)})"
                )


def _check_numbers(found: DynamicMask, axes: Axes, prober: Prober) -> None:
    """Raises Refused where the length enters as a number: only sizes, and the k of a topk, may be made of it."""
    for node in found.region:
        numbers = [n for n in node.all_input_nodes if _of_length(n, prober)]
        if numbers and target_name(node) != "topk" and target_name(node) not in _SIZED:
            raise Refused(
                f"the mask depends on the length of the sequence as a number in {node.target} ({source_line(node)})"
            )
        if target_name(node) == "topk" and numbers:
            size = expr(value(numbers[0]))
            if size != prober.seq and not (
                type(size).__name__ == "Min" and all(a == prober.seq or a.is_Integer for a in size.args)
            ):
                raise Refused(
                    f"a topk chooses {size} tokens, which grows with the sequence ({source_line(node)})"
                )
    for node in axes.apart:
        if shape(node) and not prober.dependence.is_positional(node):
            raise Refused(f"the mask depends on {node.name}, which is no function of each position alone")


# Operators that bring the elements along a dimension together, in which hidden ones (-inf) change nothing.
_ALONG = {
    "topk": 2,
    "sort": 1,
    "argsort": 1,
    "softmax": 1,
    "_softmax": 1,
    "log_softmax": 1,
    "_log_softmax": 1,
}
_EXTREMES = ("amax", "max", "argmax", "logsumexp")
_FAR = 1e30  # no score is that large


def _check_past(found: DynamicMask, axes: Axes, query: Axis, key: Axis, prober: Prober) -> None:
    """Raises Refused where an operator brings keys together that a query does not see yet, or queries with each other.

    A cache has no later keys, and slots behind the last token hold anything: what works along the keys must get those
    hidden. Of a chunk there are the chunk's queries alone.
    """
    for node in found.region:
        name = target_name(node)
        dims = _along(node, name)
        for dim in dims:
            source = node.args[0]
            assert isinstance(source, Node)
            if not axes.is_seq(source, dim):
                continue
            if axes.find(source, dim) == query:
                raise Refused(f"the mask brings queries together in {node.target} ({source_line(node)})")
            if axes.find(source, dim) != key or name == "cumsum":
                continue
            passes_over = (name in _ALONG or name in _EXTREMES) and not _takes_the_least(node)
            if not passes_over or not _hidden_ahead(source, axes, query, key, prober, chosen=name == "topk"):
                raise Refused(
                    f"the mask of a query depends on later keys in {node.target} ({source_line(node)}), which a cache "
                    "does not have; hide them with -inf before"
                )
        if (
            name in ("matmul", "bmm", "mm")
            and isinstance(node.args[0], Node)
            and axes.is_seq(node.args[0], -1)
        ):
            raise Refused(f"the mask sums over tokens in {node.target} ({source_line(node)})")


def _along(node: Node, name: str) -> list[int]:
    """The dimensions along which an operator brings elements together."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not shape(source):
        return []
    rank = len(shape(source))
    if name in _ALONG:
        place = _ALONG[name]
        dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", -1)
        return [dim % rank] if isinstance(dim, int) else list(range(rank))
    if name in REDUCE or name in ("cumsum", "cumprod", "cummax", "mean", "std", "var", "norm"):
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if dims is None or dims == []:
            return list(range(rank))
        return [int(d) % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]  # type: ignore[arg-type]
    return []


def _takes_the_least(node: Node) -> bool:
    """topk(source, k, dim, largest=False), sort(source, dim, descending=False): what is hidden comes first."""
    name = target_name(node)
    if name == "topk":
        return (node.args[3] if len(node.args) > 3 else node.kwargs.get("largest", True)) is not True
    if name in ("sort", "argsort"):
        return (node.args[2] if len(node.args) > 2 else node.kwargs.get("descending", False)) is not True
    return False


def _hidden_ahead(
    source: Node, axes: Axes, query: Axis, key: Axis, prober: Prober, chosen: bool = False
) -> bool:
    """Whether the elements of later keys are proved to be -inf, or as good as that.

    chosen: by a topk, which takes what is below every score after all that the query sees, whatever it is
    """
    named: dict[int, Expr] = {}
    for dim, size in enumerate(shape(source)):
        if axes.is_seq(source, dim):
            named[dim] = Q if axes.find(source, dim) == query else K
        elif expr(size) == prober.batch:
            named[dim] = B
        elif expr(size) == 1:
            named[dim] = integer(0)
        else:
            named[dim] = H
    t = prober.reader.translator(1)
    try:
        element = t.element(source, tuple(named[dim] for dim in range(len(named))))
        element = cast(element, torch.float32)
        if chosen:  # what hides even so is below every score
            element = make("add", torch.float32, element, const(_FAR, torch.float32))
        form = normal_form(element, None, t.prover)
    except (Untranslatable, NoNormalForm):
        return False
    return (chosen or form.infinite) and t.prover.never(form.seen, lt(Q, K))


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
            if target_name(node) in _SIZED:
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
