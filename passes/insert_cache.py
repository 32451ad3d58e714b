"""Puts the cache into a canonical graph: each `kvcompile::attention` becomes `kvcompile::cached_attention`.

The result is a pure function of its placeholders but for the cache tensors, which it updates in place:

    input_ids [B, S], (position_ids [B, S]), (logits_to_keep [K]), (past_length []),
    positions [B, S]   position of each new token in its sequence; negative for padding
    seq_lens [B]       tokens each sequence has seen
    span               slots of contiguous layers to read
    rope_{i}_cos/sin   tables [P, R], one pair per embedding of layouts that count positions in the cache
    cache_{layer}_{keys|values}_{part}
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from kvcompile.kernels import ops
from kvcompile.kernels.spec import SiteSpec
from kvcompile.passes.base import PassReport
from kvcompile.passes.clean import eliminate_dead_code
from kvcompile.plan import Decision, Plan
from kvcompile.types import AttentionSite

STEP_INPUTS = ("positions", "seq_lens", "span")


@dataclass(frozen=True)
class RopeTable:
    """A pair of table placeholders, and the nodes of the canonical graph that they tabulate."""

    cos_name: str
    sin_name: str
    cos: Node
    sin: Node


@dataclass(frozen=True)
class Rewritten:
    """The cached graph; `caches[layer]` are the placeholder names of that layer's buffers, in layout order."""

    graph_module: GraphModule
    caches: tuple[tuple[str, ...], ...]
    ropes: tuple[RopeTable, ...]
    report: PassReport


def insert_cache(canonical: GraphModule, sites: tuple[AttentionSite, ...], plan: Plan) -> Rewritten:
    """Rewrite a copy of `canonical` (weights shared) as `plan` says; the sites' nodes are canonical's."""
    started = time.perf_counter()
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    output = graph.graph_copy(canonical.graph, copied)
    graph.output(output)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]

    def placeholder(name: str) -> Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        return last

    positions, seq_lens, span = (placeholder(name) for name in STEP_INPUTS)
    ropes: dict[tuple[Node, Node], RopeTable] = {}
    rope_nodes: dict[tuple[Node, Node], list[Node]] = {}
    caches: list[tuple[str, ...]] = []
    for site, decision in zip(sites, plan.decisions, strict=True):
        rope: list[Node] = []
        q, k = site.q, site.k
        if decision.layout.retention.in_cache:
            assert site.rope is not None, "the plan refuses in_cache without a rotary embedding"
            pair = (site.rope.cos, site.rope.sin)
            if pair not in ropes:
                names = (f"rope_{len(ropes)}_cos", f"rope_{len(ropes)}_sin")
                ropes[pair] = RopeTable(*names, *pair)
                rope_nodes[pair] = [placeholder(name) for name in names]
            rope, q, k = rope_nodes[pair], site.rope.q_input, site.rope.k_input
        buffers = [placeholder(name) for name in _buffer_names(decision, plan)]
        caches.append(tuple(node.name for node in buffers))
        spec = SiteSpec(decision.layout, decision.sm_scale, decision.mask.window)
        old = copied[site.out]
        with graph.inserting_before(old):
            new = graph.call_function(
                ops.cached_attention,
                (
                    copied[q],
                    copied[k],
                    copied[site.v],
                    buffers,
                    positions,
                    seq_lens,
                    rope,
                    span,
                    spec.to_json(),
                ),
            )
        new.meta = dict(old.meta) | {"kvcompile_layer": decision.layer}
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    module = GraphModule(canonical, graph, "CachedDecoder")
    eliminate_dead_code(module)
    module.graph.lint()
    module.recompile()
    report = PassReport("insert_cache", len(sites), (), time.perf_counter() - started)
    return Rewritten(module, tuple(caches), tuple(ropes.values()), report)


def _buffer_names(decision: Decision, plan: Plan) -> list[str]:
    specs = decision.layout.buffers(
        decision.num_kv_heads,
        decision.head_dim,
        decision.v_head_dim,
        plan.torch_dtype,
        plan.limits.max_tokens,
    )
    return [f"cache_{decision.layer}_{spec.name.replace('.', '_')}" for spec in specs]
