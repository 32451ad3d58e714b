"""Rule `repeat_kv`: from an operand of an attention block back to its tensor at its own number of heads.

    operand[b, h] = source[b, h // G],   source [B, H / G, S, D]

The walk goes up through operators that only move elements (expand, reshape, transpose, repeat_interleave,
index, ..); each ancestor of rank 4 is a candidate, in any order of its dimensions. Which candidate *is* the
source is proved: the operand's element at symbolic places, translated (`passes/score_mod`), must be the element of the
source that the formula says. Where there is no such, the operand itself is brought to the heads of the product, in the
order in which they stand there.
"""

from __future__ import annotations

from itertools import permutations

import torch
from torch.fx import Node

from kvcompile.passes.graph import call, expr, shape, target_name
from kvcompile.passes.probe.probe import Prober
from kvcompile.passes.records import NoMatch
from kvcompile.passes.rules.block import no_match

NAME = "repeat_kv"
MOVES = (
    "expand",
    "reshape",
    "view",
    "_unsafe_view",
    "unsqueeze",
    "squeeze",
    "transpose",
    "permute",
    "t",
    "mT",
    "clone",
    "contiguous",
    "repeat_interleave",
    "repeat",
    "index",
    "index_select",
    "flatten",
    "unflatten",
    "slice",
    "to",
    "_to_copy",
    "movedim",
    "select",
    "numpy_T",
    "swapaxes",
    "matrix_H",
    "expand_as",
    "view_as",
    "tile",
)


def resolve(
    operand: Node,
    product: Node,
    transposed: bool,
    prober: Prober,
    at_least: int = 1,
) -> Node | NoMatch:
    """The source [B, H / G, S, D] of `operand`; inserts a permute where the graph has no node in that layout.

    product: [.., S, .], to whose batch dimensions the operand broadcasts; transposed: operand is [.., D, S].
    at_least: heads that the source must have.
    """
    num_heads = prober.reader.heads(product)
    if num_heads is None:
        return no_match(NAME, f"the batch is not part of the dimensions {shape(product)}", product)
    candidates = []
    current: Node | None = operand
    distance = 0
    while current is not None:
        for order in _orders(current, prober):
            candidates.append(
                (int(shape(current)[order[1]]), order != (0, 1, 2, 3), distance, order, current)
            )
        moves = current.op == "call_function" and target_name(current) in MOVES and shape(current)
        parents = [n for n in current.all_input_nodes if shape(n)] if moves else []
        # index(x, [.., table]) moves x by a table; the walk follows x
        current = current.args[0] if parents and isinstance(current.args[0], Node) else None
        distance += 1
    for heads, _, _, order, source in sorted(candidates, key=lambda c: c[:3]):
        if (
            heads >= at_least
            and num_heads % heads == 0
            and prober.reader.repeats(operand, product, source, order, transposed)
        ):
            return source if order == (0, 1, 2, 3) else _permuted(source, order)
    unfolded = _unfolded(operand, num_heads, transposed, prober) or _all_heads(
        operand, product, transposed, prober
    )
    if unfolded is not None:
        return unfolded
    return no_match(
        NAME, f"no tensor [batch, heads, sequence, channels] explains the operand {operand}", operand
    )


def _orders(node: Node, prober: Prober) -> list[tuple[int, ...]]:
    """Permutations of a rank-4 node's dimensions that make it [B, H, S, D]."""
    sizes = [expr(size) for size in shape(node)]
    if len(sizes) != 4:
        return []
    return [
        order
        for order in permutations(range(4))
        if sizes[order[0]] == prober.batch
        and sizes[order[2]] == prober.seq
        and sizes[order[1]].is_Integer
        and sizes[order[3]].is_Integer
    ]


def _unfolded(operand: Node, num_heads: int, transposed: bool, prober: Prober) -> Node | None:
    """[B * H, S, D] (scaled after it was flattened, for `bmm`) as [B, H, S, D], where the batch leads."""
    sizes = [expr(size) for size in shape(operand)]
    if len(sizes) != 3 or sizes[0] != prober.batch * num_heads:
        return None
    rows = prober.dependence.fact(operand).dims
    roles = [factor.role for factor in rows[0]] if rows else []
    if roles not in (["batch"], ["batch", "free"]):  # rows of one sequence stand together
        return None
    aten, graph = torch.ops.aten, operand.graph
    with graph.inserting_after(operand):
        if transposed:
            operand = call(graph, aten.transpose.int, (operand, 1, 2), operand)
    with graph.inserting_after(operand):
        return call(graph, aten.unflatten.int, (operand, 0, [-1, num_heads]), operand)


def _all_heads(operand: Node, product: Node, transposed: bool, prober: Prober) -> Node | None:
    """[B, G, R, S, D], or what broadcasts to the product's dimensions, as [B, G * R, S, D]: heads in their order."""
    lead = shape(product)[:-2]
    own, wanted = ([expr(size) for size in sizes] for sizes in (shape(operand), lead))
    if len(own) != len(wanted) + 2 or len(wanted) < 2 or wanted[0] != prober.batch or own[0] != prober.batch:
        return None
    if any(not size.is_Integer for size in wanted[1:]):
        return None
    aten, graph = torch.ops.aten, operand.graph
    with graph.inserting_after(operand):
        if transposed:
            operand = call(graph, aten.transpose.int, (operand, -2, -1), operand)
    if own[1:-2] != wanted[1:]:
        sizes = [-1, *map(int, wanted[1:]), -1, -1]
        with graph.inserting_after(operand):
            operand = call(graph, aten.expand.default, (operand, sizes), operand)
    if len(wanted) == 2:
        return operand
    with graph.inserting_after(operand):
        return call(graph, aten.flatten.using_ints, (operand, 1, len(wanted) - 1), operand)


def _permuted(source: Node, order: tuple[int, ...]) -> Node:
    """The source in [B, H, S, D]: the permute inserted right behind it for an earlier site, or a new one."""
    target, args = torch.ops.aten.permute.default, (source, list(order))
    if source.next.target is target and source.next.args == args:
        return source.next
    with source.graph.inserting_after(source):
        return call(source.graph, target, args, source)
