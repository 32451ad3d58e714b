"""Rule `rope`: rotary embedding of queries and keys in the rotate-half style (Su et al. 2021).

    out = x * cos + rotate(x) * sin,   rotate((a, b)) = (-b, a) on halves of the first `rotary_dim` channels

The walk goes up from q and k to the sum of two products; x, cos and sin are then *checked* by evaluating
with random x, cos and sin against the formula. Whatever is not exactly this (interleaved, complex, scaled
afterwards) stays in the graph as it is, which is correct, and the site has no RopeSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.base import ancestors, call, expr, shape, target_name
from kvcompile.passes.probe import Prober, Refused
from kvcompile.passes.rules.block import no_match
from kvcompile.types import NoMatch, RopeSpec

NAME = "rope"
_BATCH, _SEQ = 2, 29
_PASSING = ("to", "_to_copy", "clone", "contiguous", "type_as")
_PARTS = ("slice", "split", "split_with_sizes", "chunk", "getitem", "narrow")


@dataclass(frozen=True)
class Rotation:
    """One rotated tensor: x before, the cos and sin factors as they multiply (broadcast over heads)."""

    x: Node
    cos: Node
    sin: Node
    rotary_dim: int


def match(q: Node, k: Node, prober: Prober) -> RopeSpec | NoMatch:
    """The rotary embedding of a site's queries and keys, or why none was found."""
    rotations = []
    for node in (q, k):
        found = _rotation(node, prober)
        if isinstance(found, NoMatch):
            return found
        rotations.append(found)
    rq, rk = rotations
    if (rq.cos, rq.sin, rq.rotary_dim) != (rk.cos, rk.sin, rk.rotary_dim):
        return no_match(NAME, "queries and keys are rotated by different tables", k)
    cos, sin = (_table(node, rq.rotary_dim, prober) for node in (rq.cos, rq.sin))
    if cos is None or sin is None:
        return no_match(NAME, "cos and sin are no functions of position alone, [B or 1, S, rotary_dim]", k)
    return RopeSpec("half", rq.rotary_dim, rq.x, rk.x, cos, sin)


def _rotation(node: Node, prober: Prober) -> Rotation | NoMatch:
    sums = _sums(node)
    if not sums:
        return no_match(NAME, f"expected a sum of two products, found {target_name(_skip(node))}", node)
    for total, rotary_dim in sums:
        products = [_skip(operand) for operand in total.all_input_nodes]
        for first, second in (products, products[::-1]):
            for (x_part, cos), (_, sin) in product(_pairs(first), _pairs(second)):
                for x in _wholes(x_part, node) if shape(cos) and shape(sin) else ():
                    rotation = Rotation(x, cos, sin, rotary_dim)
                    if _checks(rotation, node, prober):
                        return rotation
    return no_match(NAME, "the sum of two products is not x * cos + rotate_half(x) * sin", sums[0][0])


def _sums(node: Node) -> list[tuple[Node, int]]:
    """Sums of two products that may be the rotated channels (or their first half), with their rotary_dim.

    x * cos + ..; cat([x * cos + .., rest]); cat([a * c - b * s, ..]); cat([cat([a * c - b * s, ..]), rest])
    """
    found = []
    current = _skip(node)
    widths = [int(shape(current)[-1])] if shape(current) else []
    for _ in range(3):
        if target_name(current) in ("add", "sub") and all(
            target_name(_skip(operand)) in ("mul", "neg") for operand in current.all_input_nodes
        ):
            found += [(current, width) for width in dict.fromkeys(widths)]
        if target_name(current) != "cat" or not isinstance(current.args[0], (list, tuple)):
            break
        part = current.args[0][0]
        assert isinstance(part, Node)
        current = _skip(part)
        widths.append(int(shape(current)[-1]))
    return found


def _skip(node: Node) -> Node:
    while target_name(node) in _PASSING and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _pairs(term: Node) -> list[tuple[Node, Node]]:
    operands = term.all_input_nodes if target_name(term) == "mul" else []
    return [(operands[0], operands[1]), (operands[1], operands[0])] if len(operands) == 2 else []


def _wholes(part: Node, node: Node) -> list[Node]:
    """`part` and what it was cut from: nodes of the rotated tensor's own shape [B, H, S, D]."""
    found, current = [], part
    while True:
        if [expr(s) for s in shape(current)] == [expr(s) for s in shape(node)]:
            found.append(current)
        if target_name(current) not in (*_PARTS, *_PASSING) or not isinstance(current.args[0], Node):
            return found
        current = current.args[0]


def _checks(rotation: Rotation, node: Node, prober: Prober) -> bool:
    """Evaluate `node` on random x, cos, sin and compare with the formula."""
    cut = {rotation.x, rotation.cos, rotation.sin}
    if not cut <= ancestors([node], cut) or len(cut) != 3:
        return False
    generator = torch.Generator().manual_seed(0)
    values: dict[Node, Tensor] = {}
    for source in (rotation.x, rotation.cos, rotation.sin):
        size = prober.concrete(source, _BATCH, _SEQ)
        values[source] = torch.randn(size, generator=generator).to(prober.device, source.meta["val"].dtype)
    try:
        found: Tensor = prober.run([node], _BATCH, _SEQ, dict(values))[0]
    except Refused:
        return False
    x, cos, sin = (values[source].float() for source in (rotation.x, rotation.cos, rotation.sin))
    if {cos.shape[-1] * 2, sin.shape[-1] * 2} == {rotation.rotary_dim}:  # the halves share one table
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    if {cos.shape[-1], sin.shape[-1]} != {rotation.rotary_dim}:
        return False
    head, rest = x[..., : rotation.rotary_dim], x[..., rotation.rotary_dim :]
    a, b = head.chunk(2, -1)
    wanted = torch.cat([head * cos + torch.cat([-b, a], -1) * sin, rest], -1)
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-1
    return found.shape == wanted.shape and torch.allclose(
        found.float(), wanted, rtol=tolerance, atol=tolerance
    )


def _table(node: Node, rotary_dim: int, prober: Prober) -> Node | None:
    """The node [B or 1, S, rotary_dim] behind a factor that broadcasts over heads."""
    sizes = [expr(size) for size in shape(node)]
    if len(sizes) < 2 or sizes[-2] != prober.seq or any(size not in (1, prober.batch) for size in sizes[:-2]):
        return None
    aten = torch.ops.aten
    if len(sizes) == 4 and sizes[1] == 1:
        source = node.args[0] if target_name(node) == "unsqueeze" and node.args[1] in (1, -3) else None
        node = source if isinstance(source, Node) else _reused(node, aten.select.int, (node, 1, 0))
    elif len(sizes) == 2:
        node = _reused(node, aten.unsqueeze.default, (node, 0))
    elif len(sizes) != 3:
        return None
    return node if sizes[-1] == rotary_dim else _reused(node, aten.cat.default, ([node, node], -1))


def _reused(node: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """That call right behind `node`; the one inserted for an earlier layer if there is one."""
    for user in node.users:
        if user.target is target and tuple(user.args) == args and user is node.next:
            return user
    with node.graph.inserting_after(node):
        return call(node.graph, target, args, node)
