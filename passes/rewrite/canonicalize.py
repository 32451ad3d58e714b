"""Canonicalize: each attention block becomes one `kvcompile::attention` node; what it replaced is gone."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from kvcompile.kernels.ops import attention as attention_op
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.detect.detect import Detection
from kvcompile.passes.graph import call, expr, shape, value
from kvcompile.passes.graph_module import module_of
from kvcompile.passes.records import AttentionSite, Leaf
from kvcompile.passes.rewrite.clean import drop_dead
from kvcompile.passes.table import graph_pass
from kvcompile.util.faking import faking

log = logging.getLogger(__name__)
aten = torch.ops.aten
assert attention_op.LIBRARY  # importing it registers the op


@dataclass(frozen=True)
class Canonical:
    """The canonical graph (weights shared with the model) and its sites, with nodes of this graph."""

    graph_module: GraphModule
    sites: tuple[AttentionSite, ...]


@graph_pass("canonicalize")
def canonicalize(captured: Captured, detection: Detection) -> Canonical:
    """A copy of the captured graph with one kvcompile::attention node per site; equal to it on all inputs."""
    graph, mapping = _copy(captured.graph_module)
    placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    batch, seq = (expr(dim) for dim in shape(placeholders["input_ids"]))
    sites = []
    known: dict[Any, Any] = {}  # what the op gives, by the forms of what it is given
    for site in detection.sites:
        moved = site.moved(mapping)
        window = -1 if moved.mask.window is None else moved.mask.window
        old = moved.out
        with graph.inserting_before(old):
            args = (moved.q, moved.k, moved.v, moved.sm_scale, moved.mask.kind, window, moved.layer)
            more = score_arguments(moved)
            form = _form(args[:-1], more)
            val = known.get(form)
            if val is None and more:
                # Of plain attention, the operator itself is as quick, and has its own strides.
                val = _scored(moved)
            new = call(graph, torch.ops.kvcompile.attention.default, args, old, more, val)
            known.setdefault(form, new.meta.get("val"))
            result = _in_shape_of(old, new, moved.q, batch, seq)
            if old.meta["val"].dtype != moved.dtype:
                result = call(graph, aten.to.dtype, (result, old.meta["val"].dtype), old)
        old.replace_all_uses_with(result)
        graph.erase_node(old)
        mapping[site.out] = result  # a later site may attend to what this one gives
        sites.append(replace(moved, out=new))
    # The rope tables and the layouts that detection added have no users yet: a later pass reads them.
    keep = {node for site in sites for node in site.kept}
    drop_dead(graph, keep)
    graph_module = module_of(captured.graph_module, graph, "Canonical")
    graph_module.graph.lint()
    log.info("canonicalize: %d sites", len(sites))
    return Canonical(graph_module, tuple(sites))


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All of an operator's arguments that the form of its result can depend on."""

    def told(leaf: Any) -> Any:
        val = value(leaf)
        if not isinstance(val, Tensor):
            return expr(val) if isinstance(val, torch.SymInt) else (type(val), val)
        sizes = tuple(expr(size) for size in (*val.shape, *val.stride(), val.storage_offset()))
        return (val.dtype, val.device, val.requires_grad, val.dim(), sizes)

    return (*kwargs, *map(told, tree_leaves((args, kwargs))))


def _scored(site: AttentionSite) -> Tensor:
    """The fake value of attention whose scores are computed one by one: a new tensor, without that arithmetic."""
    q, v = value(site.q), value(site.v)
    with faking(q.fake_mode):
        result: Tensor = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return result


def score_arguments(site: AttentionSite) -> dict[str, Any]:
    """Keyword arguments of `kvcompile::attention` for what the site does to its scores."""
    score = site.score
    found = {
        "softcap": score.softcap,
        "sinks": site.sinks,
        "bias_kind": score.bias and score.bias.kind,
        "bias": site.bias,
        "mod": score.mod and json.dumps(score.mod.to_dict()),
        "leaves": [_as_read(leaf) for leaf in site.leaves] or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _as_read(leaf: Leaf) -> Node:
    """A leaf's tensor in the order in which expressions read it: [B, S, ..], [B or 1, S, S, ..]."""
    node = leaf.node
    if leaf.kind == "table":
        return node
    if leaf.order != list(range(len(leaf.order))):
        node = call(node.graph, aten.permute.default, (node, leaf.order), leaf.node)
    if leaf.kind == "pair" and leaf.dims[0] < 0:
        node = call(node.graph, aten.unsqueeze.default, (node, 0), leaf.node)
    return node


def _copy(graph_module: GraphModule) -> tuple[Graph, dict[Node, Node]]:
    graph = Graph()
    mapping: dict[Node, Node] = {}
    output = graph.graph_copy(graph_module.graph, mapping)
    graph.output(output)
    return graph, mapping


def _in_shape_of(old: Node, new: Node, q: Node, batch: Any, seq: Any) -> Node:
    """[B, H, S, Dv] in the dimensions of the node it replaces, e.g. [B * H, S, Dv] for bmm."""
    sizes = [expr(size) for size in shape(old)]
    if len(sizes) == 4 and sizes == [expr(size) for size in shape(new)]:
        return new
    graph = old.graph
    dims: list[Any] = []
    for size in sizes:
        if size.is_Integer:
            dims.append(int(size))
        elif size in (batch, seq):
            dims.append(call(graph, aten.sym_size.int, (q, 0 if size == batch else 2), old))
        else:
            dims.append(-1)
    return call(graph, aten.reshape.default, (new, dims), old)
