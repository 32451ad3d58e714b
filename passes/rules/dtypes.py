"""Brings the operands of an attention block to one dtype, without a rounding that the model does not have.

    q.float() k.float()^T, values in bfloat16   ->  q, k, v in bfloat16: the product of the same numbers
    q, k in float32, values in bfloat16         ->  q, k, v in float32: values are cast, which rounds nothing

GPT-J, GPT-Neo and CodeGen compute scores so. A cast to a wider dtype changes no number, so what is before it is the
same operand, and the attention operator computes scores in float32 of either. Where queries or keys are computed in
the wider dtype, rounding them would be another model: then what is narrower is cast, and the result is cast back
(`passes/rewrite/canonicalize.py`). Of values alone in a wider dtype that would leave out how the model rounds scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch.fx import Node

from kvcompile.passes.graph import call, target_name, value
from kvcompile.passes.rules.block import Block
from kvcompile.passes.rules.repeat_kv import MOVES

_CASTS = ("to", "_to_copy", "type_as")
# What holds every number of a dtype.
_HOLDS = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def rounded(block: Block) -> str | None:
    """What is wrong with scores in a narrower dtype than values: results would be exact where the model's are not."""
    kinds = [of(node) for node in (block.q, block.k, block.v)]
    if torch.promote_types(kinds[0], kinds[2]) == kinds[0]:
        return None
    told = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
    return (
        f"expected queries and keys of the dtype of values, or of a wider one, they are {told}: scores are rounded to "
        f"{str(kinds[0]).removeprefix('torch.')}, and results are not; cast queries and keys as values are"
    )


def narrowed(block: Block) -> Block:
    """The block with queries and keys in the dtype of its values, where they are that cast to a wider one."""
    wanted = of(block.v)
    q, k = (_before_casts(node, wanted) for node in (block.q, block.k))
    return block if q is None or k is None else replace(block, q=q, k=k)


def widened(*operands: Node) -> list[Node]:
    """The operands in the narrowest dtype that holds the numbers of all of them."""
    wanted = reduce(torch.promote_types, map(of, operands))
    return [cast(node, wanted) for node in operands]


def cast(node: Node, wanted: torch.dtype) -> Node:
    """The node in dtype `wanted`."""
    return node if of(node) == wanted else _behind(node, torch.ops.aten.to.dtype, (node, wanted))


def of(node: Node) -> torch.dtype:
    """The dtype of a node's tensor."""
    found = node.meta["val"].dtype
    assert isinstance(found, torch.dtype)
    return found


def _before_casts(node: Node, wanted: torch.dtype) -> Node | None:
    """A node with the same numbers in dtype `wanted`, made of what a cast was given; None: there is no such."""
    if of(node) == wanted:
        return node
    name, args = target_name(node), node.args
    source = args[0] if args else None
    if (
        node.op != "call_function"
        or not isinstance(source, Node)
        or not isinstance(value(source), torch.Tensor)
    ):
        return None
    if name in _CASTS:
        exact = of(source) == of(node) or of(node) in _HOLDS.get(of(source), ())
        here = value(source).device == value(node).device
        return _before_casts(source, wanted) if exact and here else None
    if name not in MOVES:
        return None
    found = _before_casts(source, wanted)
    assert callable(node.target)
    return None if found is None else _behind(node, node.target, (found, *args[1:]), dict(node.kwargs))


def _behind(
    node: Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Node:
    """A call right behind `node`; the one that an earlier site has put there, if it is equal."""
    kwargs = kwargs or {}
    if (node.next.target, node.next.args, node.next.kwargs) == (target, args, kwargs):
        return node.next
    with node.graph.inserting_after(node):
        return call(node.graph, target, args, node, kwargs)
