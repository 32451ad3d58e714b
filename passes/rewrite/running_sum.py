"""Running sums: a count of tokens along the sequence becomes an op whose state a cache can carry.

    cumsum(x, 1), x [B, S] of integers   ->   kvcompile::running_sum(x)

This is how models make position ids from the tokens, e.g. padding_idx + the number of tokens up to here that are no
padding. Elsewhere a cumulative sum mixes tokens outside attention and is refused (`passes/rewrite/positions.py`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from kvcompile.kernels.ops.running_sum import running_sum
from kvcompile.passes.graph import call, expr, module_path, shape, source_line
from kvcompile.specs import RecurrentState, StateSlot

aten = torch.ops.aten
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def is_running_sum(node: Node) -> bool:
    """A cumulative sum of integers [B, S] along the sequence."""
    if node.target is not aten.cumsum.default:
        return False
    source, dim = node.args[0], node.args[1]
    assert isinstance(source, Node)
    sizes = shape(source)
    along = dim in (1, -1) and len(sizes) == 2
    return along and bool(expr(sizes[1]).free_symbols) and source.meta["val"].dtype in _INTEGERS


def replace_running_sums(graph: Graph, leave: Collection[Node] = ()) -> tuple[RecurrentState, ...]:
    """Make an op of each running sum of `graph` (in place) but those in `leave`; returns the state that each needs
    with a cache."""
    states = []
    for node in [node for node in graph.nodes if is_running_sum(node) and node not in leave]:
        key = f"{module_path(node) or 'model'} ({source_line(node)}, {node.name})"
        with graph.inserting_before(node):
            new = call(graph, running_sum, (node.args[0], key), node)
            if new.meta["val"].dtype != node.meta["val"].dtype:
                new = call(graph, aten.to.dtype, (new, node.meta["val"].dtype), node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        states.append(RecurrentState(key, (StateSlot("sum", (), "int64"),), feed="together"))
    return tuple(states)
