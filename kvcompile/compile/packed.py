"""Regions of a packed step: those of a cached graph, with `cached_attention_packed` in the place of `cached_attention`.

All else treats each token alone, so it stays as it is and sees the tokens of all sequences as one row [1, T]. What told
attention of the sequences of a batch tells it now of those of the row:

    seq_lens [R], page tables [R, pages], what is in no page [R, ..]    as before, of R sequences
    query_start_loc [R + 1], num_decodes, max_query_len                 new; `kernels/ops/cached_attention_packed.py`
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from kvcompile.compile.regions import RegionCall, Regions
from kvcompile.kernels.ops.cached_attention import cached_attention
from kvcompile.kernels.ops.cached_attention_packed import cached_attention_packed

NEW_INPUTS = ("query_start_loc", "num_decodes", "max_query_len")
# What has one entry for each sequence of a batch: nothing but attention may ask for it.
_OF_SEQUENCES = ("seq_lens", "span", "rows", "past_length")


def packed(regions: Regions) -> Regions:
    """The regions of a packed step; the weights are shared.

    Raises:
        ValueError: something else than attention reads what is said of the sequences.
    """
    attends = [any(_is_site(node) for node in module.graph.nodes) for module in regions.modules]
    for call in regions.calls:
        _check(regions.modules[call.region], call)
    modules = tuple(
        _packed(module) if with_site else module
        for module, with_site in zip(regions.modules, attends, strict=True)
    )
    calls = tuple(
        replace(call, inputs=(*call.inputs, *NEW_INPUTS)) if attends[call.region] else call
        for call in regions.calls
    )
    return replace(regions, modules=modules, calls=calls, placeholders=(*regions.placeholders, *NEW_INPUTS))


def _is_site(node: Node) -> bool:
    return node.target is cached_attention


def _check(module: GraphModule, call: RegionCall) -> None:
    """Refuse a region in which anything but attention depends on more than its own token.

    Raises:
        ValueError: as `packed`.
    """
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, name in zip(given, call.inputs, strict=True):
        own = name in _OF_SEQUENCES or name.startswith(("page_table_", "cache_", "state_"))
        others = [user for user in node.users if not _is_site(user)]
        if own and others:
            raise ValueError(f"{others[0].target} reads {name}, which is of sequences and not of tokens")


def _packed(module: GraphModule) -> GraphModule:
    graph = Graph()
    made: dict[Node, Node] = {}
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in given:
        made[node] = graph.node_copy(node)
    starts, decodes, longest = (graph.placeholder(name) for name in NEW_INPUTS)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        made[node] = copied = graph.node_copy(node, lambda source: made[source])
        if _is_site(node):
            q, k, v, buffers, positions, seq_lens, rope, span, spec = copied.args
            copied.target = cached_attention_packed
            copied.args = (
                *(q, k, v, buffers, positions, starts, seq_lens, rope),
                *(decodes, longest, span, spec),
            )
    graph.lint()
    return GraphModule(torch.nn.Module(), graph, f"Packed{type(module).__name__}")
