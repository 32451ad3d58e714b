"""Rule `token_local`: outside its attention blocks, a decoder with a KV cache treats each token alone.

A convolution over the sequence, a token shift or a recurrence would need state of its own beside the KV
cache. Checked by evaluating: attention results are replaced by fixed random values, one token changes, and
every q, k, v and logit at the other positions must stay. Costs two forward passes over 2 x 13 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.base import expr, shape
from kvcompile.passes.probe import Prober
from kvcompile.passes.rules.block import no_match
from kvcompile.types import AttentionSite, NoMatch

NAME = "token_local"
_BATCH, _SEQ, _CHANGED = 2, 13, 6


def check(sites: Sequence[AttentionSite], logits: Node, prober: Prober) -> NoMatch | None:
    """None when tokens only meet in the attention blocks, else where they meet first."""
    generator = torch.Generator().manual_seed(0)
    results: dict[Node, Tensor] = {}
    for site in sites:
        values = torch.randn(prober.concrete(site.out, _BATCH, _SEQ), generator=generator)
        results[site.out] = values.to(prober.device, site.dtype)
    wanted = list(dict.fromkeys([*(node for s in sites for node in (s.q, s.k, s.v)), logits]))
    pair = [_evaluate(wanted, results, changed, prober) for changed in (False, True)]
    if not any(_differs(node, a, b, prober) for node, a, b in zip(wanted, *pair, strict=True)):
        return None
    # Only now, with a message to write: the first node of all at which another position changes.
    every = [
        node
        for node in logits.graph.nodes
        if node.op == "call_function" and shape(node) and node not in results
    ]
    pair = [_evaluate(every, results, changed, prober) for changed in (False, True)]
    first = next((n for n, a, b in zip(every, *pair, strict=True) if _differs(n, a, b, prober)), logits)
    return no_match(
        NAME, f"tokens mix outside attention, in {first.target}: that needs state besides K and V", first
    )


def _evaluate(wanted: list[Node], results: dict[Node, Tensor], changed: bool, prober: Prober) -> list[Tensor]:
    inputs = prober.inputs(_BATCH, _SEQ)
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, _CHANGED] = (
        1 - inputs["input_ids"][0, _CHANGED] if changed else inputs["input_ids"][0, _CHANGED]
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = torch.arange(_SEQ, device=prober.device)
    return prober.evaluate(wanted, inputs, dict(results))


def _differs(node: Node, before: Tensor, after: Tensor, prober: Prober) -> bool:
    """Whether anything but position `_CHANGED` of row 0 changed; nodes without both axes say nothing."""
    sizes = [expr(size) for size in shape(node)]
    rows = [i for i, size in enumerate(sizes) if size == prober.batch]
    columns = [i for i, size in enumerate(sizes) if size in (prober.seq, prober.keep)]
    if len(rows) != 1 or len(columns) != 1 or not before.is_floating_point():
        return False
    change = (after.float() - before.float()).abs().nan_to_num()
    change = change.movedim((rows[0], columns[0]), (0, 1)).reshape(_BATCH, _SEQ, -1).amax(-1)
    change[0, _CHANGED] = 0
    tolerance = 1e-4 if before.dtype in (torch.float32, torch.float64) else 3e-2
    return bool(change.max() > tolerance * before.float().abs().max().clamp(max=1e6))
