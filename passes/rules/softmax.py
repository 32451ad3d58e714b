"""Rule `softmax`: attention spelled out, found from its softmax.

    T = matmul(q, k^T);  p = softmax(f(T), -1);  out = matmul(p, v)

f is any mixture of scale, softcap, bias, mask and casts, in any order and polarity: it is translated, not matched
(`passes/score_mod`). So is what happens to the probabilities (`rules/weighing.py`). `bmm`, `baddbmm` and `einsum`
arrive as matmul or bmm.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.passes.graph import expr, shape
from kvcompile.passes.probe.probe import Prober
from kvcompile.passes.records import NoMatch
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.passes.rules.weighing import around

NAME = "softmax"
aten = torch.ops.aten
_SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)


def is_candidate(node: Node, prober: Prober) -> bool:
    """A softmax over something that grows with the sequence; a router's is over experts."""
    if node.target not in _SOFTMAX:
        return False
    sizes = shape(node)
    dim = node.args[1]
    assert isinstance(dim, int)
    return prober.seq in expr(sizes[dim]).free_symbols


def match(node: Node, prober: Prober) -> Block | NoMatch | tuple[Block, ...]:
    """The block around a softmax, or why there is none."""
    sizes, dim, final = shape(node), node.args[1], node.args[0]
    assert isinstance(dim, int) and isinstance(final, Node)
    if dim % len(sizes) != len(sizes) - 1:
        return no_match(NAME, f"the softmax runs over dimension {dim}, expected the last", node)
    columns = expr(sizes[-1])
    if columns not in (prober.seq, prober.seq + 1):
        return no_match(NAME, f"the softmax runs over {sizes[-1]} columns, not over the sequence", node)
    if len(sizes) < 3 or prober.seq not in (expr(size) for size in sizes[:-1]):
        return no_match(
            NAME, "the softmax over the sequence has no row per position: a pooling, not attention", node
        )
    return around(NAME, node, final, prober)
