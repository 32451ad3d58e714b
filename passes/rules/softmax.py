"""Rule `softmax`: attention spelled out, found from its softmax.

    T = matmul(q, k^T);  p = softmax(f(T), -1);  out = matmul(p, v)

f is any mixture of scale, mask and casts, in any order and polarity: it is probed, not matched. Between the
softmax and the second product: casts, views, dropout that does nothing. `bmm`, `baddbmm` and `einsum`
arrive as matmul or bmm.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.passes.base import expr, shape, target_name
from kvcompile.passes.probe import Prober, Refused
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.types import NoMatch

NAME = "softmax"
aten = torch.ops.aten
_SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
_PRODUCT = (aten.matmul.default, aten.bmm.default)
_PASSING = (
    "to",
    "_to_copy",
    "view",
    "reshape",
    "_unsafe_view",
    "expand",
    "clone",
    "contiguous",
    "type_as",
    "squeeze",
    "unsqueeze",
)


def is_candidate(node: Node, prober: Prober) -> bool:
    """A softmax over something that grows with the sequence; a router's is over experts."""
    if node.target not in _SOFTMAX:
        return False
    sizes = shape(node)
    dim = node.args[1]
    assert isinstance(dim, int)
    return prober.seq in expr(sizes[dim]).free_symbols


def match(node: Node, prober: Prober) -> Block | NoMatch:
    """The block around a softmax, or why there is none."""
    sizes, dim, final = shape(node), node.args[1], node.args[0]
    assert isinstance(dim, int) and isinstance(final, Node)
    if dim % len(sizes) != len(sizes) - 1:
        return no_match(NAME, f"the softmax runs over dimension {dim}, expected the last", node)
    if expr(sizes[-1]) != prober.seq:
        return no_match(
            NAME, f"the softmax runs over {sizes[-1]} columns, not over the sequence (sink logits?)", node
        )
    if len(sizes) < 3 or expr(sizes[-2]) != prober.seq:
        return no_match(
            NAME, "the softmax over the sequence has no row per position: a pooling, not attention", node
        )
    products = _score_products(final, prober)
    if len(products) != 1:
        what = (
            "no matmul of queries and keys"
            if not products
            else f"{len(products)} matmuls (relative positions?)"
        )
        return no_match(NAME, f"the softmax input comes from {what}", node)
    raw = products[0]
    out = _value_product(node)
    if isinstance(out, NoMatch):
        return out
    q, k, v = raw.args[0], raw.args[1], out.args[1]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    if any(expr(length) != prober.seq for length in (shape(q)[-2], shape(k)[-1], shape(v)[-2])):
        return no_match(NAME, "queries, keys or values do not run over the sequence", node)
    try:
        probed = prober.scores(raw, final, int(shape(q)[-1]))
    except Refused as refused:
        return no_match(NAME, str(refused), node)
    return Block(NAME, q, k, v, out, True, probed.sm_scale, probed.mask)


def _score_products(final: Node, prober: Prober) -> list[Node]:
    """Matmuls with an [S, S] result from which the softmax input is computed without another product."""
    found, seen, stack = [], set(), [final]
    while stack:
        node = stack.pop()
        sizes = shape(node)
        if node in seen or len(sizes) < 2 or any(expr(size) != prober.seq for size in sizes[-2:]):
            continue
        seen.add(node)
        if node.target in _PRODUCT:
            found.append(node)
        elif node.target not in _SOFTMAX:
            stack.extend(node.all_input_nodes)
    return found


def _value_product(node: Node) -> Node | NoMatch:
    """The product of the probabilities with the values."""
    current = node
    while True:
        users = list(current.users)
        if len(users) != 1:
            names = ", ".join(target_name(user) for user in users) or "nothing"
            return no_match(
                NAME, f"the probabilities are used by {names}, expected one product with the values", current
            )
        user = users[0]
        if user.target in _PRODUCT and user.args[0] is current:
            return user
        if target_name(user) not in _PASSING or shape(user)[-2:] != shape(current)[-2:]:
            return no_match(
                NAME, f"the probabilities pass through {target_name(user)} before the values", user
            )
        current = user
