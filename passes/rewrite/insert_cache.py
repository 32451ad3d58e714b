"""Puts the cache into a canonical graph: each `kvcompile::attention` becomes `kvcompile::cached_attention`.

The result is a pure function of its placeholders but for the cache tensors, which it updates in place:

    input_ids [B, S], (position_ids [B, S]), (logits_to_keep [K]), (past_length []),
    positions [B, S]   position of each new token in its sequence; negative for padding
    seq_lens [B]       tokens each sequence has seen
    span               slots of contiguous layers to read
    rows [2, B]        on the CPU: padded tokens of each row, tokens it has seen; only with recurrent state
    rope_{i}_cos/sin   tables [P, R], one pair per embedding that the op turns vectors by, and per device: of layouts
                       that keep keys before it, and of sites that turn them on append
    page_table_{i}     int32 [B, pages], one per group of paged layers that have the same pages (`Plan.page_groups`)
    cache_{layer}_{keys|values}_{part}; cache_{layer}_mask_{i}: what a mask computed from activations keeps
    state_{module}_{slot}  recurrent state [B, ...]; each `kvcompile::opaque` of such a module becomes a `mixer`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.ops import opaque
from kvcompile.kernels.ops.running_sum import cached_running_sum, running_sum
from kvcompile.kernels.spec import Share
from kvcompile.layouts import PageGroup
from kvcompile.passes.capture.opaque import is_mixer
from kvcompile.passes.graph_module import module_of
from kvcompile.passes.records import AttentionSite, RopeSpec
from kvcompile.passes.rewrite.clean import drop_dead
from kvcompile.passes.rewrite.dynamic_mask import Builder
from kvcompile.passes.rewrite.places import OnDevices, device_of_site
from kvcompile.passes.table import graph_pass
from kvcompile.plan import Decision, Plan

STEP_INPUTS = ("positions", "seq_lens", "span")
ROWS = "rows"


@dataclass(frozen=True)
class RopeTable:
    """A pair of table placeholders, the rotation of the canonical graph that they tabulate, and their device."""

    cos_name: str
    sin_name: str
    rope: RopeSpec
    device: torch.device


@dataclass(frozen=True)
class Rewritten:
    """The cached graph; `caches[layer]` are the placeholder names of that layer's buffers, in layout order,
    `states[i]` those of the plan's i-th recurrent state."""

    graph_module: GraphModule
    caches: tuple[tuple[str, ...], ...]
    states: tuple[tuple[str, ...], ...]
    ropes: tuple[RopeTable, ...]


@graph_pass("insert_cache")
def insert_cache(canonical: GraphModule, sites: tuple[AttentionSite, ...], plan: Plan) -> Rewritten:
    """Rewrite a copy of `canonical` (weights shared) as `plan` says; the sites' nodes are canonical's."""
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
    on_devices = OnDevices(graph, _first_device(canonical))
    on = on_devices.on
    ropes: dict[tuple[str, torch.device], RopeTable] = {}
    rope_nodes: dict[tuple[str, torch.device], list[Node]] = {}
    caches: list[tuple[str, ...]] = []
    owned: dict[int, list[Node]] = {}
    page_tables = {layer: table for group in plan.page_groups for layer, table in _table(group, placeholder)}
    masks: dict[torch.device, Builder] = {}
    for site, decision in zip(sites, plan.decisions, strict=True):
        rope: list[Node] = []
        q, k, device = site.q, site.k, device_of_site(site)
        if decision.rotary_in_op is not None:
            assert site.rope is not None, "the plan rotates only what detection found a rotation in"
            table = (site.rope.table, device)
            if table not in ropes:
                pair = (f"rope_{len(ropes)}_cos", f"rope_{len(ropes)}_sin")
                ropes[table] = RopeTable(*pair, site.rope, device)
                rope_nodes[table] = [placeholder(name) for name in pair]
            rope, q, k = rope_nodes[table], site.rope.q_input, site.rope.k_input
        named = _buffer_names(decision, plan)
        of_layout = len(named) - len(decision.mask_rows)
        if decision.owns:
            owned[decision.layer] = [placeholder(name) for name in named[:of_layout]]
        buffers = owned[decision.kv_source]
        mask_buffers = [placeholder(name) for name in named[of_layout:]]
        caches.append(tuple(node.name for node in (*buffers, *mask_buffers)))
        spec = decision.site_spec(_share(decision, plan))
        old = copied[site.out]
        with graph.inserting_before(old):
            extra: dict[str, Any] = {
                name: copied[node] for name, node in (("sinks", site.sinks), ("bias", site.bias)) if node
            }
            if site.leaves:
                if device not in masks:
                    masks[device] = Builder(graph, on(positions, device), span, copied)
                extra["leaves"] = masks[device].leaves(site.leaves, mask_buffers)
            if decision.kv_source in page_tables:
                extra["page_table"] = on(page_tables[decision.kv_source], device)
            v = copied[site.v]
            if decision.rotary_in_op is not None and decision.layout.in_keys:
                # Its values are channels of the keys that it keeps; these, after RoPE, would keep RoPE in the graph.
                v = graph.call_function(torch.ops.aten.slice.Tensor, (copied[k], 3, 0, decision.v_head_dim))
            new = graph.call_function(
                ops.cached_attention,
                (
                    copied[q],
                    copied[k],
                    v,
                    buffers,
                    on(positions, device),
                    on(seq_lens, device),
                    rope,
                    span,
                    spec.to_json(),
                ),
                extra,
            )
        new.meta = dict(old.meta) | {"kvcompile_layer": decision.layer}
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        copied[site.out] = new  # a later site may attend to what this one gives
    states = [tuple(f"state_{i}_{j}" for j in range(len(s.slots))) for i, s in enumerate(plan.states)]
    if states:
        rows = placeholder(ROWS)
        numbers = {state.module_path: i for i, state in enumerate(plan.states)}
        for old in [node for node in graph.nodes if is_mixer(node)]:
            inputs, key = old.args
            buffers = [placeholder(name) for name in states[numbers[opaque.find(str(key)).path]]]
            with graph.inserting_before(old):
                new = graph.call_function(opaque.mixer, (inputs, buffers, rows, key))
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        for old in [node for node in graph.nodes if node.target is running_sum]:
            (total,) = (placeholder(name) for name in states[numbers[str(old.args[1])]])
            with graph.inserting_before(old):
                device = old.meta["val"].device
                steps = (on(seq_lens, device), on(positions, device))
                new = graph.call_function(cached_running_sum, (old.args[0], total, *steps))
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
            graph.erase_node(old)
    drop_dead(graph)
    module = module_of(canonical, graph, "CachedDecoder")
    module.graph.lint()
    return Rewritten(module, tuple(caches), tuple(states), tuple(ropes.values()))


def _first_device(canonical: GraphModule) -> torch.device:
    """Where token ids come to."""
    ids = next(node for node in canonical.graph.nodes if node.target == "input_ids")
    device: torch.device = ids.meta["val"].device
    return device


def _table(group: PageGroup, placeholder: Callable[[str], Node]) -> list[tuple[int, Node]]:
    """The group's page table, for each of its layers."""
    table = placeholder(group.name)
    return [(layer, table) for layer in group.layers]


def _share(decision: Decision, plan: Plan) -> Share:
    """The site's place among those that read one cache."""
    group = [other.layer for other in plan.decisions if other.kv_source == decision.kv_source]
    if len(group) == 1:
        return "none"
    if decision.layer == group[0]:
        return "first"
    return "last" if decision.layer == group[-1] else "middle"


def _buffer_names(decision: Decision, plan: Plan) -> list[str]:
    specs = decision.buffers(plan.torch_dtype, plan.limits.max_tokens)
    return [f"cache_{decision.layer}_{spec.name.replace('.', '_')}" for spec in specs]
