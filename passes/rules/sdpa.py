"""Rule `sdpa`: aten.scaled_dot_product_attention over the sequence.

    out = softmax(scale * q k^T + mask) v,   q [B, Hq, S, D], k [B, H, S, D], v [B, H, S, Dv]

Supported: is_causal, an attn_mask (mask and bias; `passes/score_mod`), enable_gqa, a scale.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.passes.graph import expr, shape
from kvcompile.passes.probe.probe import Prober, Refused
from kvcompile.passes.records import NoMatch
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.passes.rules.leaves import leaves_of

NAME = "sdpa"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def is_candidate(node: Node, prober: Prober) -> bool:
    """An SDPA whose keys run over something that grows with the sequence.

    Keys of a fixed number (a memory of weights, heads) need no cache; what they are made of is derived as elsewhere.
    """
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return False
    keys = node.args[1]
    return isinstance(keys, Node) and prober.seq in expr(shape(keys)[-2]).free_symbols


def match(node: Node, prober: Prober) -> Block | NoMatch:
    """The block at an SDPA node, or why there is none."""
    arguments = {**_DEFAULTS, **dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    for name, operand in (("query", q), ("key", k), ("value", v)):
        if len(shape(operand)) != 4:
            return no_match(NAME, f"{name} has {len(shape(operand))} dimensions, expected 4", node)
        if expr(shape(operand)[-2]) != prober.seq:
            return no_match(
                NAME, f"{name} runs over {shape(operand)[-2]} positions, not over the sequence", node
            )
    if arguments["dropout_p"]:
        return no_match(NAME, f"dropout_p is {arguments['dropout_p']} in eval mode; pass 0 there", node)
    attn_mask, scale = arguments["attn_mask"], arguments["scale"]
    if isinstance(scale, Node):
        return no_match(NAME, "the scale is computed in the graph", node)
    heads, dim = int(shape(q)[1]), int(shape(q)[-1])
    sm_scale = float(scale) if isinstance(scale, (int, float)) else dim**-0.5
    mask = attn_mask if isinstance(attn_mask, Node) else None
    try:
        found = prober.reader.sdpa(mask, bool(arguments["is_causal"]), sm_scale, heads, dim)
        leaves = leaves_of(found.leaves, prober)
    except Refused as refused:
        return no_match(NAME, str(refused), node)
    return Block(
        NAME,
        q,
        k,
        v,
        node,
        False,
        found.sm_scale,
        found.mask,
        softcap=found.softcap,
        slopes=found.slopes,
        mod=found.mod,
        leaves=leaves,
        grouped=True,  # enable_gqa
    )
