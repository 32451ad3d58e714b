"""From the scores to the result: what stands between the product of queries and keys and that with the values.

    out = weights(softmax([f(q k^T), sink])[keys]) v

All of it is translated into one expression (`passes/score_mod`), in which casts, permutes, idle dropout and the
slice that drops a sink's column are nothing. A factor behind the product that is made of the scores' sum, a gate
sigmoid(logsumexp - s), is a sink logit s.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from kvcompile.passes.graph import descendants, expr, shape, target_name
from kvcompile.passes.probe.probe import Prober, Refused
from kvcompile.passes.records import NoMatch
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.passes.rules.leaves import leaves_of
from kvcompile.passes.rules.sinks import sink_node
from kvcompile.passes.score_mod.site import Scores

aten = torch.ops.aten
_PRODUCT = (aten.matmul.default, aten.bmm.default)
# Of what these look at they take the shape alone.
_SHAPED_LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")


def around(rule: str, anchor: Node, final: Node, prober: Prober) -> Block | NoMatch | tuple[Block, ...]:
    """The block whose probabilities `anchor` computes from the softmax input `final`, or why there is none.

    Probabilities that weigh several values are a block with each of these.
    """
    raws = _score_products(final, prober)
    if len(raws) != 1:
        what = f"{len(raws)} matmuls (relative positions?)" if raws else "no matmul of queries and keys"
        return no_match(rule, f"the softmax input comes from {what}", anchor)
    products = _value_products(rule, anchor)
    if isinstance(products, NoMatch):
        return products
    blocks = []
    for product in products:
        block = _block(rule, anchor, raws[0], product, prober)
        if isinstance(block, NoMatch):
            return block
        blocks.append(block)
    return blocks[0] if len(blocks) == 1 else tuple(blocks)


def _block(rule: str, anchor: Node, raw: Node, product: Node, prober: Prober) -> Block | NoMatch:
    """The block of the raw scores and one product of their probabilities with values."""
    q, k, v = raw.args[0], raw.args[1], product.args[1]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    if any(expr(length) != prober.seq for length in (shape(q)[-2], shape(k)[-1], shape(v)[-2])):
        return no_match(rule, "queries, keys or values do not run over the sequence", anchor)
    try:
        num_heads = _heads(raw, prober)
        out, found = _read(raw, product, num_heads, int(shape(q)[-1]), prober)
        leaves = leaves_of(found.leaves, prober)
    except Refused as refused:
        return no_match(rule, str(refused), anchor)
    sinks = None if found.sinks is None else sink_node(found.sinks, out, {raw, v}, prober)
    return Block(
        rule,
        q,
        k,
        v,
        out,
        True,
        found.sm_scale,
        found.mask,
        scores=raw,
        softcap=found.softcap,
        slopes=found.slopes,
        sinks=sinks,
        mod=found.mod,
        leaves=leaves,
    )


def _heads(raw: Node, prober: Prober) -> int:
    batch = math.prod(prober.concrete(raw, 2, 29)[:-2])
    if batch % 2:
        raise Refused(f"the batch is not part of the product's dimensions {tuple(map(str, shape(raw)))}")
    return batch // 2


def _read(raw: Node, product: Node, num_heads: int, dim: int, prober: Prober) -> tuple[Node, Scores]:
    """The node with the block's result, and its scores; a factor behind the product may stand for a sink."""
    for out in _gated(raw, product):
        beside = [
            n for n in out.all_input_nodes if n in descendants([raw]) and n not in descendants([product])
        ]
        try:
            return out, prober.reader.weighed(raw, product, num_heads, dim, beside[0])
        except Refused:
            break  # whatever stands behind the product is looked at as a part of the model then
    return product, prober.reader.weighed(raw, product, num_heads, dim)


def _score_products(final: Node, prober: Prober) -> list[Node]:
    """Matmuls with an [S, S] result from which the softmax input is computed without another product."""
    found, seen, stack = [], set(), [final]
    while stack:
        node = stack.pop()
        sizes = [expr(size) for size in shape(node)]
        # Of the queries and of the keys (and a sink) beside them; scores stand in any order of dimensions.
        over_both = sum(prober.seq in size.free_symbols for size in sizes) > 1
        if node in seen or target_name(node) in _SHAPED_LIKE or not over_both:
            continue
        seen.add(node)
        if node.target in _PRODUCT:
            found.append(node)
        else:
            stack.extend(node.all_input_nodes)
    return [node for node in found if all(expr(size) == prober.seq for size in shape(node)[-2:])]


def _value_products(rule: str, anchor: Node) -> list[Node] | NoMatch:
    """The products of the probabilities with values, in the order of the graph: they reach nothing else."""
    found, seen, stack = [], {anchor}, [anchor]
    while stack:
        for user in stack.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.target in _PRODUCT or not shape(user):
                found.append(user)
            else:
                stack.append(user)
    if not found or any(node.target not in _PRODUCT or node.args[0] not in seen for node in found):
        names = ", ".join(dict.fromkeys(target_name(node) for node in found)) or "nothing"
        returned = any(node.op == "output" for node in found)
        hint = (
            "; a cache has no maps of attention, so the model must not give or use them" if returned else ""
        )
        return no_match(
            rule, f"the probabilities are used by {names}, expected products with values{hint}", anchor
        )
    order = {node: place for place, node in enumerate(anchor.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _gated(raw: Node, product: Node) -> list[Node]:
    """Nodes behind the product in which it meets something else that is made from the scores."""
    found: list[Node] = []
    # Beside the product, what the scores reach: a gate made from their sum.
    beside, stack = set[Node](), [raw]
    while stack:
        for user in stack.pop().users:
            if user is not product and user not in beside:
                beside.add(user)
                stack.append(user)
    current = product
    while len(current.users) == 1:
        user = next(iter(current.users))
        if target_name(user) == "mul" and any(n in beside and n is not current for n in user.all_input_nodes):
            same = [expr(size) for size in shape(user)] == [expr(size) for size in shape(product)]
            return [user] if same else []
        if target_name(user) not in ("to", "_to_copy", "clone", "contiguous"):
            break
        current = user
    return found
