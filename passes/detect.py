"""Detect: find every attention block of a captured graph, or say exactly what is in the way.

A block is a call site: an SDPA node, or a softmax, over the sequence. Every candidate must match; one miss
fails the whole call, because a block left alone would attend to the new tokens only.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace

from kvcompile.errors import DetectionError
from kvcompile.passes.base import module_path, shape, source_line
from kvcompile.passes.capture import Captured
from kvcompile.passes.probe import Prober
from kvcompile.passes.rules import repeat_kv, rope, sdpa, softmax, token_local
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.types import AttentionSite, NoMatch, RopeSpec

log = logging.getLogger(__name__)

ANCHORS = (sdpa, softmax)


@dataclass(frozen=True)
class Detection:
    """The attention sites in call order, and what did not match without harm (RoPE left in the graph)."""

    sites: tuple[AttentionSite, ...]
    misses: tuple[NoMatch, ...]
    seconds: float


def detect(captured: Captured) -> Detection:
    """Find the attention blocks of `captured`; raises DetectionError unless every block is found.

    May insert permutes and reshapes without effect into the captured graph, where K, V, cos or sin exist in
    another layout only.
    """
    start = time.perf_counter()
    prober = Prober(captured.graph_module, captured.max_seq_len)
    sites: list[AttentionSite] = []
    misses: list[NoMatch] = []
    notes: list[NoMatch] = []
    for node in list(captured.graph_module.graph.nodes):
        anchor = next((rule for rule in ANCHORS if rule.is_candidate(node, prober)), None)
        if anchor is None:
            continue
        block = anchor.match(node, prober)
        found = block if isinstance(block, NoMatch) else _site(block, len(sites), prober)
        if isinstance(found, NoMatch):
            misses.append(found)
            continue
        spec = rope.match(found.q, found.k, prober)
        if isinstance(spec, RopeSpec):
            found = replace(found, rope=spec)
        else:
            notes.append(spec)
        shared = next(
            (site.kv_source for site in sites if site.k is found.k and site.v is found.v), found.layer
        )
        sites.append(replace(found, kv_source=shared))
    _require_all(sites, misses)
    output = next(node for node in captured.graph_module.graph.nodes if node.op == "output")
    mixed = token_local.check(sites, output.args[0][captured.logits_index], prober)
    if mixed is not None:
        raise DetectionError(f"a KV cache alone cannot hold this model's state:\n  - {mixed}", (mixed,))
    captured.graph_module.recompile()
    seconds = time.perf_counter() - start
    log.info("detect: %d sites, %d notes, %.2f s", len(sites), len(notes), seconds)
    return Detection(tuple(sites), tuple(notes), seconds)


def _require_all(sites: list[AttentionSite], misses: list[NoMatch]) -> None:
    if misses:
        lines = "\n".join(f"  - {miss}" for miss in misses)
        raise DetectionError(
            f"{len(misses)} of {len(sites) + len(misses)} attention blocks were not recognised:\n{lines}",
            misses,
        )
    if not sites:
        raise DetectionError(
            "the model has no softmax attention over the sequence, so there is no KV cache to choose"
        )


def _site(block: Block, layer: int, prober: Prober) -> AttentionSite | NoMatch:
    """Bring a block's operands to [B, H, S, D] at their own head counts."""
    batch = prober.concrete(block.out, 2, 29)[:-2]
    heads = math.prod(batch) // 2
    if math.prod(batch) % 2:
        return no_match(
            block.idiom, f"the batch is not part of the product's dimensions {shape(block.out)}", block.out
        )
    own = prober.concrete(block.k, 2, 29)[:-2]
    resolved = []
    for operand, transposed in ((block.q, False), (block.k, block.k_transposed), (block.v, False)):
        dims, count = batch, heads
        if block.idiom == sdpa.NAME and operand is not block.q:  # enable_gqa: K and V have fewer heads than Q
            dims, count = own, math.prod(own) // 2
        found = repeat_kv.resolve(operand, dims, count, transposed, prober)
        if isinstance(found, NoMatch):
            return found
        resolved.append(found)
    q, k, v = resolved
    num_q, num_k, num_v = (int(shape(node)[1]) for node in resolved)
    if num_q != heads:
        return no_match(block.idiom, f"queries have {num_q} heads of the product's {heads}", block.out)
    if num_k != num_v:  # one of them was repeated further up than the walk reaches: meet at the larger
        return no_match(block.idiom, f"keys have {num_k} heads, values {num_v}", block.out)
    return AttentionSite(
        layer=layer,
        module_path=module_path(block.out),
        source=source_line(block.out),
        idiom=block.idiom,
        q=q,
        k=k,
        v=v,
        out=block.out,
        num_qo_heads=num_q,
        num_kv_heads=num_k,
        head_dim=int(shape(q)[3]),
        v_head_dim=int(shape(v)[3]),
        sm_scale=block.sm_scale,
        mask=block.mask,
        rope=None,
        dtype=q.meta["val"].dtype,
        kv_source=layer,
    )
