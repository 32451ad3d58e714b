"""Rule `sdpa`: aten.scaled_dot_product_attention over the sequence.

    out = softmax(scale * q k^T + mask) v,   q [B, Hq, S, D], k [B, H, S, D], v [B, H, S, Dv]

Supported: is_causal, or an attn_mask (mask and bias) that is a function of positions; enable_gqa; a scale.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.passes import dynamic_mask
from kvcompile.passes.base import expr, shape
from kvcompile.passes.positional import Positional
from kvcompile.passes.probe import DependsOnTokens, Prober, Refused
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.passes.scores import probe_mask
from kvcompile.types import MaskSpec, NoMatch

NAME = "sdpa"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def is_candidate(node: Node, prober: Prober) -> bool:
    """An SDPA whose queries or keys run over something that grows with the sequence."""
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return False
    lengths = [expr(shape(operand)[-2]) for operand in node.args[:2] if isinstance(operand, Node)]
    return any(prober.seq in length.free_symbols for length in lengths)


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
    attn_mask = arguments["attn_mask"]
    if attn_mask is None and not arguments["is_causal"]:
        return no_match(NAME, "the mask is bidirectional: query 3 sees key 7", node)
    found, dynamic = Positional(MaskSpec("causal"), None), None
    if isinstance(attn_mask, Node):
        try:
            try:
                found = probe_mask(prober, attn_mask)
            except DependsOnTokens:
                dynamic = dynamic_mask.find(attn_mask, prober, prober.results)
        except Refused as refused:
            return no_match(NAME, str(refused), node)
    scale = arguments["scale"]
    if isinstance(scale, Node):
        return no_match(NAME, "the scale is computed in the graph", node)
    sm_scale = float(scale) if isinstance(scale, (int, float)) else int(shape(q)[-1]) ** -0.5
    return Block(NAME, q, k, v, node, False, sm_scale, found.mask, bias=found.bias, dynamic=dynamic)
