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
from typing import Any

import torch
from torch.fx import Node

from kvcompile.expression import B, H, K, Q, ScoreMod, integer, program
from kvcompile.passes.detect.keys_ahead import check_past
from kvcompile.passes.detect.query_key_dims import Axes, Axis, Unknown, is_pointwise
from kvcompile.passes.graph import ancestors, expr, shape, source_line, target_name, value
from kvcompile.passes.probe.evaluate import depends_on
from kvcompile.passes.probe.probe import Prober, Refused
from kvcompile.passes.records import DynamicMask, KeySide, PositionalPart, Side
from kvcompile.passes.score_mod.leaves import LeafRef, Untranslatable

aten = torch.ops.aten
_CREATE = ("new_zeros", "new_ones", "new_full", "new_empty", "zeros", "ones", "full")
SIZED = (*_CREATE, "expand", "view", "reshape", "_unsafe_view")


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
    check_past(found, axes, query, key, prober)
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
    if not inside:
        # Of positions alone: the last operator is built again, and its operands are what it is made of.
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
        if numbers and target_name(node) != "topk" and target_name(node) not in SIZED:
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
