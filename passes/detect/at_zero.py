"""Queries or keys before their rotary embedding, as nodes of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from kvcompile.passes.detect.rotation import Rotations
from kvcompile.passes.graph import call, expr, shape
from kvcompile.passes.records import Rotation


def clone_at_zero(rotations: Rotations, rotation: Rotation, tables: Sequence[Tensor]) -> Node:
    """A copy of what is rotated, with the tables of position 0 in the tables' place; returns its end.

    Queries or keys before the embedding: exactly so, as products with one and sums with nought round nothing.
    """
    graph, module = rotation.output.graph, rotations.graph_module
    copied: dict[Node, Node] = {}
    for node, table in zip(rotation.tables, tables, strict=True):
        for dim, size in enumerate(shape(node)):
            if expr(size) in (rotations.seq, rotations.batch):
                table = table.narrow(dim, 0, 1)
        name = f"{node.name}_at_zero"
        found = next((n for n in graph.nodes if n.op == "get_attr" and n.target == name), None)
        if found is None:
            module.register_buffer(name, table.contiguous(), persistent=False)
            with graph.inserting_before(next(iter(graph.nodes))):
                found = graph.get_attr(name)
            fake = node.meta["val"].fake_mode
            found.meta["val"] = fake.from_tensor(table.contiguous(), static_shapes=True)
        copied[node] = found
    for node in rotations.rotated(rotation):
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: copied.get(n, n))
        with graph.inserting_after(
            _latest([n for n in _nodes((args, kwargs)) if n.op == "call_function"], node)
        ):
            copied[node] = call(graph, node.target, args, node, kwargs)  # type: ignore[arg-type]
    return copied[rotation.output]


def _latest(nodes: list[Node], otherwise: Node) -> Node:
    return max(nodes) if nodes else otherwise


def _nodes(tree: Any) -> list[Node]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Node)]
