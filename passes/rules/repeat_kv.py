"""Rule `repeat_kv`: from an operand of an attention block back to its tensor at its own number of heads.

    operand[b, h] = source[b, h // G],   source [B, H / G, S, D]

The walk goes up through operators that only move elements (expand, reshape, transpose, repeat_interleave,
index, ..); each ancestor of rank 4 is a candidate, in any order of its dimensions. Which candidate *is* the
source is decided by evaluating: random values there must come out in the operand exactly as the formula
says.
"""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.base import call, expr, shape, target_name
from kvcompile.passes.probe import Prober, Refused
from kvcompile.passes.rules.block import no_match
from kvcompile.types import NoMatch

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
_BATCH, _SEQ = 2, 29


def resolve(
    operand: Node,
    batch_shape: tuple[int, ...],
    num_heads: int,
    transposed: bool,
    prober: Prober,
    at_least: int = 1,
) -> Node | NoMatch:
    """The source [B, H / G, S, D] of `operand`; inserts a permute where the graph has no node in that layout.

    batch_shape: the product's concrete batch dimensions at B = 2, S = 29; transposed: operand is [.., D, S].
    at_least: heads that the source must have.
    """
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
            and _explains(source, order, operand, batch_shape, num_heads, transposed, prober)
        ):
            return source if order == (0, 1, 2, 3) else _permuted(source, order)
    unfolded = _unfolded(operand, num_heads, transposed, prober) if num_heads >= at_least else None
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


def _explains(
    source: Node,
    order: tuple[int, ...],
    operand: Node,
    batch_shape: tuple[int, ...],
    num_heads: int,
    transposed: bool,
    prober: Prober,
) -> bool:
    size = prober.concrete(source, _BATCH, _SEQ)
    dtype = source.meta["val"].dtype
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(prober.device, dtype)
    try:
        found: Tensor = prober.run([operand], _BATCH, _SEQ, {source: values})[0]
    except Refused:
        return False
    found = found.transpose(-1, -2) if transposed else found
    if found.shape[-2] != _SEQ or found.dtype != dtype:
        return False
    found = found.expand(*batch_shape, *found.shape[-2:]).reshape(_BATCH, num_heads, *found.shape[-2:])
    wanted = values.permute(order)
    return torch.equal(found, wanted.repeat_interleave(num_heads // wanted.shape[1], dim=1))


def _unfolded(operand: Node, num_heads: int, transposed: bool, prober: Prober) -> Node | None:
    """[B * H, S, D] (scaled after it was flattened, for `bmm`) as [B, H, S, D], where the batch leads."""
    sizes = [expr(size) for size in shape(operand)]
    if len(sizes) != 3 or sizes[0] != prober.batch * num_heads:
        return None
    inputs = prober.inputs(_BATCH, _SEQ)
    changed = inputs | {"input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][1] = 1 - changed["input_ids"][1]
    before, after = (prober.evaluate([operand], values, {})[0] for values in (inputs, changed))
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    if same != [True] * num_heads + [False] * num_heads:  # rows of one sequence stand together
        return None
    aten, graph = torch.ops.aten, operand.graph
    with graph.inserting_after(operand):
        if transposed:
            operand = call(graph, aten.transpose.int, (operand, 1, 2), operand)
    with graph.inserting_after(operand):
        return call(graph, aten.unflatten.int, (operand, 0, [-1, num_heads]), operand)


def _permuted(source: Node, order: tuple[int, ...]) -> Node:
    """The source in [B, H, S, D]: the permute inserted right behind it for an earlier site, or a new one."""
    target, args = torch.ops.aten.permute.default, (source, list(order))
    if source.next.target is target and source.next.args == args:
        return source.next
    with source.graph.inserting_after(source):
        return call(source.graph, target, args, source)
