"""Graph digest: a hash of what a graph computes, the same in every process that has captured the same model.

Processes may have one model's nodes under other names and in another order: its Python may go through a set, whose
order is another one in each process (Gemma 3 does, over the kinds of its layers). So a node is known by its operator
and by what that is given. Only collectives count in their order, which ranks must have in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, map_arg

from kvcompile.passes.graph import target_name
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.shard.collectives import is_collective


def graph_digest(module: GraphModule, named: Collection[str], pieces: Mapping[str, tuple[str, Any]]) -> str:
    """A hash of a graph.

    Args:
        named: weights and buffers of the model; what else the graph has is a constant, and goes by its content.
        pieces: of what is a part of a larger tensor, by name in the graph: that tensor's name, and which part.
    """
    known: dict[Node, str] = {}
    ordered: list[str] = []
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                what: tuple[Any, ...] = (str(node.target),)
            case "get_attr":
                name = str(node.target)
                whole, part = pieces.get(name, (name, ""))
                what = (whole if whole in named else _content(fetch_attr(module, name)), str(part))
            case _:
                given = map_arg((node.args, node.kwargs), known.__getitem__)
                what = (_target(node), *map(repr, given))
        known[node] = _hash((node.op, *what))
        if is_collective(node) or node.op in ("placeholder", "output"):
            ordered.append(known[node])
    return _hash(ordered)


def names_of(model: nn.Module) -> frozenset[str]:
    """All names of a model's weights and buffers: one that is shared has several."""
    weights = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return frozenset((*weights, *(name for name, _ in model.named_buffers(remove_duplicate=False))))


def _target(node: Node) -> str:
    """An operator's name and overload, or a function's module and name: no address of this process."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target_name(node))}"


def _content(tensor: Tensor) -> str:
    """A constant's dtype, sizes and bytes."""
    held = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _hash(
        (str(tensor.dtype), str(tuple(tensor.shape)), hashlib.sha256(held.numpy().tobytes()).hexdigest())
    )


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
