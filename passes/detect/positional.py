"""Where positions come from in a graph, and what depends on their values."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from kvcompile.passes.graph import expr, is_size, shape, target_name
from kvcompile.passes.probe.evaluate import shape_only

_COUNTING = ("cumsum", "cumprod", "logcumsumexp", "running_sum")


def position_sources(graph_module: GraphModule, seq: Any) -> list[Node]:
    """Where positions come from: the caller, counting along the sequence, and as many rows of a table."""
    found = []
    tables: set[Node] = set()  # made of weights and buffers alone
    for node in graph_module.graph.nodes:
        runs = any(is_size(size, seq) for size in shape(node))
        constant = all(parent in tables or not shape(parent) for parent in node.all_input_nodes)
        if node.op == "get_attr" or (constant and node.all_input_nodes and not runs):
            tables.add(node)
        if str(node.target) in ("position_ids", "past_length") or (
            runs
            and (
                target_name(node) in _COUNTING
                or (constant and target_name(node) in ("arange", "slice", "narrow"))
            )
        ):
            found.append(node)
    return found


def positional(graph_module: GraphModule, stop: set[Node]) -> set[Node]:
    """Nodes that depend on positions, however these are made, on a way that does not lead through `stop`."""
    ids = next(n for n in graph_module.graph.nodes if str(n.target) == "input_ids")
    return value_descendants(position_sources(graph_module, expr(shape(ids)[1])), stop)


def value_descendants(sources: Sequence[Node], stop: Container[Node] = ()) -> set[Node]:
    """Nodes that depend on the sources' values, not merely on their shapes, without those behind `stop`."""
    found = set(sources)
    for node in sources[0].graph.nodes if sources else ():
        if node not in stop and not shape_only(node) and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
