"""From the scores to the result: the softmax and the product with the values, checked as one function.

    out = softmax([f(T), sink])[keys] v

Whatever stands between the anchor (a softmax, or one spelled out) and the product, and a factor behind it that is
a function of the scores, is evaluated with random scores and values and compared with the formula. So casts,
permutes, dropout that does nothing, and the slice that drops a sink's column need no rules. A result that is
smaller than the formula without a sink by a factor per row is solved for the sink logit: exp / (1 + sum of exp)
has 0, a gate sigmoid(logsumexp - s) has s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes import dynamic_mask
from kvcompile.passes.base import ancestors, descendants, expr, shape, target_name
from kvcompile.passes.probe import DependsOnTokens, Prober, Refused
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.passes.rules.sinks import sink_node
from kvcompile.passes.scores import dynamic_leaf, probe_scores
from kvcompile.passes.softmax_input import Sink, row_dimension, rows
from kvcompile.types import NoMatch

aten = torch.ops.aten
_PRODUCT = (aten.matmul.default, aten.bmm.default)
# Of what these look at they take the shape alone.
_SHAPED_LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
_BATCH, _SEQ = 2, 29


@dataclass(frozen=True)
class _Weighed:
    """The node with the block's result, and which sink the softmax has."""

    out: Node
    sink: Sink | None


def around(rule: str, anchor: Node, final: Node, prober: Prober) -> Block | NoMatch:
    """The block whose probabilities `anchor` computes from the softmax input `final`, or why there is none."""
    products = _score_products(final, prober)
    if len(products) != 1:
        what = (
            f"{len(products)} matmuls (relative positions?)" if products else "no matmul of queries and keys"
        )
        return no_match(rule, f"the softmax input comes from {what}", anchor)
    raw = products[0]
    product = _value_product(rule, anchor)
    if isinstance(product, NoMatch):
        return product
    q, k, v = raw.args[0], raw.args[1], product.args[1]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    if any(expr(length) != prober.seq for length in (shape(q)[-2], shape(k)[-1], shape(v)[-2])):
        return no_match(rule, "queries, keys or values do not run over the sequence", anchor)
    try:
        weighed = _weighed(raw, final, product, v, prober)
        if weighed is None:
            names = ", ".join(dict.fromkeys(target_name(node) for node in _from(anchor, product)))
            return no_match(
                rule, f"what weighs the values is not the softmax of the scores ({names})", product
            )
        dynamic = None
        try:
            probed = probe_scores(prober, raw, final, weighed.sink, int(shape(q)[-1]))
        except DependsOnTokens:
            leaf = dynamic_leaf(prober, raw, final)
            if leaf is None:
                raise
            dynamic = dynamic_mask.find(leaf, prober, prober.results)
            probed = probe_scores(prober, raw, final, weighed.sink, int(shape(q)[-1]), leaf)
    except Refused as refused:
        return no_match(rule, str(refused), anchor)
    sinks = None if probed.sinks is None else sink_node(probed.sinks, weighed.out, {raw, v}, prober)
    return Block(
        rule,
        q,
        k,
        v,
        weighed.out,
        True,
        probed.sm_scale,
        probed.mask,
        scores=raw,
        softcap=probed.softcap,
        bias=probed.bias,
        sinks=sinks,
        dynamic=dynamic,
    )


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


def _value_product(rule: str, anchor: Node) -> Node | NoMatch:
    """The product of the probabilities with the values: the only one that they reach."""
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
    if len(found) != 1 or found[0].target not in _PRODUCT or found[0].args[0] not in seen:
        names = ", ".join(dict.fromkeys(target_name(node) for node in found)) or "nothing"
        return no_match(
            rule, f"the probabilities are used by {names}, expected one product with the values", anchor
        )
    return found[0]


def _from(anchor: Node, product: Node) -> list[Node]:
    after = descendants([anchor]) & ancestors([product])
    return [node for node in anchor.graph.nodes if node in after and node is not product]


def _weighed(raw: Node, final: Node, product: Node, v: Node, prober: Prober) -> _Weighed | None:
    """Compare with the formula: the product times a factor made from the scores, if there is one, else the product."""
    for out in (*_gated(raw, product), product):
        for dtype in (torch.float64, raw.meta["val"].dtype):
            generator = torch.Generator().manual_seed(0)
            scores, values = (
                torch.randn(prober.concrete(node, _BATCH, _SEQ), generator=generator, dtype=torch.float64).to(
                    prober.device, dtype
                )
                for node in (raw, v)
            )
            try:
                x, y = prober.run([final, out], _BATCH, _SEQ, {raw: scores, v: values})
            except Refused:
                if dtype != torch.float64:
                    raise
                continue
            x = rows(x.double(), _BATCH, row_dimension(prober, final))
            batch = prober.concrete(product, _BATCH, _SEQ)[:-2]
            values = (
                values.double().expand(*batch, *values.shape[-2:]).reshape(_BATCH, -1, *values.shape[-2:])
            )
            found = _formula(x, values, y.double().reshape(_BATCH, -1, *y.shape[-2:]), y.dtype)
            if found is not None:
                return _Weighed(out, found[0])
            break
    return None


def _formula(x: Tensor, v: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Sink | None] | None:
    """Which sink explains y [B, H, S, Dv] from the softmax input x [B, H, S, columns] and v [B, H, S, Dv]."""
    allowed = 64 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    extra = x.shape[-1] - v.shape[-2]
    # Rows that hide every key are NaN on both sides; that a mask has them is said elsewhere.
    p, y = x.softmax(-1).nan_to_num(), y.nan_to_num()
    if extra == 1:
        for sink, used in ((Sink(column=-1), p[..., :-1]), (Sink(column=0), p[..., 1:])):
            if _close(y, used @ v, allowed):
                return (sink,)
        return None
    if extra or x.shape[:-1] != y.shape[:-1]:
        return None
    whole = p @ v
    if _close(y, whole, allowed):
        return (None,)
    share = (y * whole).sum(-1) / whole.square().sum(-1)
    if not bool(((share > 0) & (share < 1)).all()) or not _close(y, share[..., None] * whole, allowed):
        return None
    # share = sum of exp(x) / (sum of exp(x) + exp(sink))
    logits = x.logsumexp(-1) + torch.log((1 - share) / share)
    first = logits[:1, :, :1]
    return (Sink(logits=first[0, :, 0]),) if _close(logits, first.expand_as(logits), 16 * allowed) else None


def _close(a: Tensor, b: Tensor, allowed: float) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= allowed * max(1.0, float(b.abs().max()))


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
