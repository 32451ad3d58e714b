"""Absorb: sites that a plan gives their latent form attend over latent rows instead of expanded heads.

    attention(q, k, v)  ->  up @ attention(q', rows, the rows' first channels) + bias

with the operands that rule `latent` has found (`passes/rules/latent.py`). The graph computes the same, so that the
check of detection, which compares it with the model, proves the absorbed form, too.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from kvcompile.passes.graph import call
from kvcompile.passes.graph_module import module_of
from kvcompile.passes.records import AttentionSite, LatentForm
from kvcompile.passes.rewrite.clean import drop_dead
from kvcompile.passes.rules.latent import per_head
from kvcompile.passes.table import graph_pass

log = logging.getLogger(__name__)
aten = torch.ops.aten


@graph_pass("absorb")
def absorb(
    canonical: GraphModule, sites: tuple[AttentionSite, ...], layers: Collection[int]
) -> tuple[GraphModule, tuple[AttentionSite, ...]]:
    """A copy of the canonical graph in which the sites of `layers` have their latent form, and all its sites."""
    graph = Graph()
    mapping: dict[Node, Node] = {}
    output = graph.graph_copy(canonical.graph, mapping)
    graph.output(output)
    moved = []
    for site in sites:
        before, site = site.out, site.moved(mapping)
        if site.layer in layers:
            assert site.latent is not None, "the plan absorbs only what detection found a latent form of"
            # A later site may attend to what this one gives.
            site, mapping[before] = _absorbed(site.out, site.latent)
        moved.append(replace(site, latent=None))
    drop_dead(graph, {node for site in moved for node in site.kept})
    module = module_of(canonical, graph, "Canonical")
    module.graph.lint()
    log.info("absorb: %d sites", len(layers))
    return module, tuple(moved)


def _absorbed(old: Node, form: LatentForm) -> tuple[AttentionSite, Node]:
    """Replace the attention node `old`; returns the new site, and what stands for `old`."""
    graph, site = old.graph, form.site
    with graph.inserting_before(old):
        args = (site.q, site.k, site.v, *old.args[3:])
        new = call(graph, old.target, args, old, dict(old.kwargs))  # type: ignore[arg-type]
        weight = call(graph, aten.transpose.int, (form.up, 1, 2), old)
        result = per_head(new, weight, old)
        if form.bias is not None:
            heads = int(new.meta["val"].shape[1]) // int(form.bias.meta["val"].shape[0])
            bias = call(graph, aten.repeat_interleave.self_int, (form.bias, heads, 0), old)
            bias = call(graph, aten.unsqueeze.default, (bias, 1), old)
            result = call(graph, aten.add.Tensor, (result, bias), old)
    old.replace_all_uses_with(result)
    graph.erase_node(old)
    return replace(site, out=new), result
