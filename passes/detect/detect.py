"""Detect: find every attention block of a captured graph, or say exactly what is in the way.

A block is a call site: an SDPA node, or a softmax, over the sequence. Every candidate must match; one miss
fails the whole call, because a block left alone would attend to the new tokens only.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from functools import cache, reduce

import torch
from torch.fx import Node

from kvcompile.errors import DetectionError
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.detect.position_limits import PositionLimit, position_limit
from kvcompile.passes.detect.positional import positional
from kvcompile.passes.graph import module_path, shape, source_line
from kvcompile.passes.probe.probe import Prober
from kvcompile.passes.records import AttentionSite, NoMatch, RopeSpec
from kvcompile.passes.rules import dtypes, exp_sum, latent, repeat_kv, rope, sdpa, softmax, token_local
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.passes.table import graph_pass
from kvcompile.specs import BiasSpec, ScoreSpec

log = logging.getLogger(__name__)

ANCHORS = (sdpa, softmax, exp_sum)


@dataclass(frozen=True)
class Detection:
    """The attention sites in call order, and what did not match without harm (RoPE left in the graph)."""

    sites: tuple[AttentionSite, ...]
    misses: tuple[NoMatch, ...]
    seconds: float
    limit: PositionLimit | None = None  # of what is computed from positions


@graph_pass("detect")
def detect(captured: Captured, made_for: int | None = None) -> Detection:
    """Find the attention blocks of `captured`; raises DetectionError unless every block is found.

    made_for: the longest sequence that the model was made for, where known: biases are tabulated up to there.
    May insert permutes and reshapes without effect into the captured graph, where K, V, cos or sin exist in
    another layout only.
    """
    start = time.perf_counter()
    prober = Prober(captured.graph_module, captured.max_seq_len, made_for)
    ropes = rope.RopeRule(prober)
    sites: list[AttentionSite] = []
    misses: list[NoMatch] = []
    notes: list[NoMatch] = []
    for node in list(captured.graph_module.graph.nodes):
        anchor = next((rule for rule in ANCHORS if rule.is_candidate(node, prober)), None)
        if anchor is None:
            continue
        matched = anchor.match(node, prober)
        for block in matched if isinstance(matched, tuple) else (matched,):
            found = block if isinstance(block, NoMatch) else _site(block, len(sites), prober)
            if isinstance(found, NoMatch):
                misses.append(found)
                prober.found(node)  # so that the reasons of later blocks are their own
                break
            found = _with_forms(found, sites, ropes, prober, notes)
            sites.append(found)
            prober.found(found.out)
    _require_all(sites, misses)
    sites = _in_order(sites)
    sites = _of_one_dtype(sites, ropes)
    sites = _positionless(sites, prober)
    output = next(node for node in captured.graph_module.graph.nodes if node.op == "output")
    logits = output.args[0][captured.logits_index]
    analysis = token_local.analysed(sites, prober)
    limit_of = cache(lambda: position_limit(sites, logits, prober, made_for, analysis))

    def most() -> int | None:
        limit = limit_of()
        return None if limit is None else limit.tokens

    mixed = token_local.check(sites, logits, prober, analysis, most)
    if mixed is not None:
        known = f"\n  - {captured.state_problem}" if captured.state_problem else ""
        raise DetectionError(
            f"a KV cache alone cannot hold this model's state:\n  - {mixed}{known}", (mixed,)
        )
    notes.extend(token_local.unproved(sites, logits, analysis, most()))
    limit = _with_tables(limit_of(), prober)
    captured.graph_module.recompile()
    seconds = time.perf_counter() - start
    log.info("detect: %d sites, %d notes, %.2f s", len(sites), len(notes), seconds)
    return Detection(tuple(sites), tuple(notes), seconds, limit)


def _with_forms(
    found: AttentionSite,
    before: list[AttentionSite],
    ropes: rope.RopeRule,
    prober: Prober,
    notes: list[NoMatch],
) -> AttentionSite:
    """A site with its rotation, whose cache it reads and its latent form, where it has these; notes: why not."""
    spec = ropes.match(found.q, found.k)
    if isinstance(spec, RopeSpec):
        found = replace(found, rope=spec)
    else:
        notes.append(spec)
    found = replace(found, kv_source=_kv_source(found, before))
    form = latent.match(found, prober) if found.kv_source == found.layer else None
    if isinstance(form, NoMatch):
        notes.append(form)
    elif form is not None:
        spec = ropes.match(form.site.q, form.site.k)
        own = replace(form.site, rope=spec if isinstance(spec, RopeSpec) else None)
        found = replace(found, latent=replace(form, site=own))
    return found


def _in_order(sites: list[AttentionSite]) -> list[AttentionSite]:
    """The sites in the order of their results: what a softmax weighs last may come after other softmaxes."""
    place = {node: number for number, node in enumerate(sites[0].out.graph.nodes)}
    ordered = sorted(sites, key=lambda site: place[site.out])
    if ordered == sites:
        return sites
    found: list[AttentionSite] = []
    for number, site in enumerate(ordered):
        site = replace(site, layer=number, latent=None)  # a latent form is made for who fills the cache
        found.append(replace(site, kv_source=_kv_source(site, found)))
    return found


def _with_tables(limit: PositionLimit | None, prober: Prober) -> PositionLimit | None:
    """The limit of positions, at most that of masks and biases."""
    found = prober.reader.limit()
    if found is None or (limit is not None and limit.tokens <= found[0]):
        return limit
    return PositionLimit(*found)


def _kv_source(found: AttentionSite, sites: list[AttentionSite]) -> int:
    """The first site that attends to the same keys and values."""
    return next((site.layer for site in sites if site.k is found.k and site.v is found.v), found.layer)


def _of_one_dtype(sites: list[AttentionSite], ropes: rope.RopeRule) -> list[AttentionSite]:
    """The sites in the narrowest dtype that holds all of their numbers: a plan has one, and casts to it are exact."""
    wanted = reduce(torch.promote_types, (site.dtype for site in sites))
    found = []
    for site in sites:
        if site.dtype != wanted:
            q, k, v = (dtypes.cast(node, wanted) for node in (site.q, site.k, site.v))
            spec = ropes.match(q, k)
            known = spec if isinstance(spec, RopeSpec) else None
            site = replace(site, q=q, k=k, v=v, dtype=wanted, rope=known, latent=None)
        found.append(site)
    return found


def _positionless(sites: list[AttentionSite], prober: Prober) -> list[AttentionSite]:
    """The sites, marked where no position reaches queries and keys but through other sites' results."""
    reached = positional(prober.graph_module, {site.out for site in sites})
    marked = []
    for site in sites:
        free = not reached & {site.q, site.k}
        form = site.latent and replace(site.latent, site=replace(site.latent.site, positionless=free))
        marked.append(replace(site, positionless=free, latent=form))
    return marked


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
    scores = block.out if block.scores is None else block.scores
    if (rounded := dtypes.rounded(block)) is not None:
        return no_match(block.idiom, rounded, block.out)
    block = dtypes.narrowed(block)
    q = repeat_kv.resolve(block.q, scores, False, prober)
    grouped = block.grouped
    pair = _keys_and_values(block, block.k if grouped else scores, block.k if grouped else block.out, prober)
    if isinstance(q, NoMatch):
        return q
    if isinstance(pair, NoMatch):
        return pair
    q, k, v = dtypes.widened(q, *pair)
    num_q, num_k, num_v = (int(shape(node)[1]) for node in (q, k, v))
    if num_q != heads:
        return no_match(block.idiom, f"queries have {num_q} heads of the product's {heads}", block.out)
    if num_k != num_v:
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
        score=ScoreSpec(
            block.softcap,
            None if block.slopes is None else BiasSpec("alibi"),
            block.sinks is not None,
            block.mod,
        ),
        sinks=block.sinks,
        bias=None if block.slopes is None else prober.constant("slopes", block.slopes.float(), block.out),
        leaves=block.leaves,
    )


def _keys_and_values(
    block: Block, of_keys: Node, of_values: Node, prober: Prober, at_least: int = 1
) -> tuple[Node, Node] | NoMatch:
    """K and V [B, Hkv, S, ..] behind a block's operands, which broadcast to the batch dimensions of these nodes."""
    k = repeat_kv.resolve(block.k, of_keys, block.k_transposed, prober, at_least)
    if isinstance(k, NoMatch):
        return k
    v = repeat_kv.resolve(block.v, of_values, False, prober, at_least)
    if isinstance(v, NoMatch):
        return v
    # One of them may have been repeated further up than the walk reaches: meet at the larger.
    larger = max(int(shape(k)[1]), int(shape(v)[1]))
    same = shape(k)[1] == shape(v)[1] or larger <= at_least
    return (k, v) if same else _keys_and_values(block, of_keys, of_values, prober, larger)
