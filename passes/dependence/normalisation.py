"""Softmax and norms: each element is divided by something of its neighbours, which must be in free dimensions."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments, is_tensor, nodes_in
from kvcompile.passes.dependence.facts import Fact, Level, anything, joined
from kvcompile.passes.dependence.pointwise import aligned, as_values, told
from kvcompile.passes.graph import target_name


def _along(ctx: Context, node: Node) -> Result:
    """softmax, log_softmax, normalize over one dimension; glu over two halves of one."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    dim = int(given["dim"]) % max(len(source.dims), 1)
    if source.dims and not source.only_free(dim):
        return anything(node, f"{target_name(node)} of {told(source)} over rows or tokens", (source,))
    if target_name(node) == "glu":
        half = ctx.created(node)
        assert half is not None
        return replace(source.plain(), dims=(*source.dims[:dim], half[dim], *source.dims[dim + 1 :]))
    return source.plain()


def _norm(ctx: Context, node: Node) -> Result:
    """layer_norm, rms_norm over the last dimensions, with weights of these."""
    given = arguments(node)
    shapes = given["normalized_shape"]
    assert isinstance(shapes, (list, tuple))
    source = ctx.fact(node.args[0])
    others = [ctx.fact(given[name]) for name in ("weight", "bias") if isinstance(given.get(name), Node)]
    for fact in (source, *others):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    last = range(len(source.dims) - len(shapes), len(source.dims))
    if not all(source.only_free(dim) for dim in last) or nodes_in(shapes):
        return anything(node, f"{target_name(node)} of {told(source)} over rows or tokens", (source,))
    return _weighted(node, source, others)


def _weighted(node: Node, source: Fact, others: list[Fact]) -> Fact:
    dims = aligned([source.dims, *(fact.dims for fact in others)], len(source.dims))
    if dims is None:
        return anything(node, f"weights {' and '.join(map(told, others))}", (source, *others))
    return replace(joined([source, *others]), dims=source.dims)


def _group_norm(ctx: Context, node: Node) -> Result:
    """group_norm: x [N, C, ..] over groups of C and all of what follows."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    others = [ctx.fact(given[name]) for name in ("weight", "bias") if isinstance(given.get(name), Node)]
    for fact in (source, *others):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    if not all(source.only_free(dim) for dim in range(1, len(source.dims))):
        return anything(node, f"{target_name(node)} of {told(source)} over rows or tokens", (source,))
    if not all(fact.level == Level.CONSTANT for fact in others) or not is_tensor(node):
        return anything(node, "weights that are computed", (source, *others))
    return replace(joined([source, *others]), dims=source.dims)


def _batch_norm(ctx: Context, node: Node) -> Result:
    """batch_norm in eval mode: one number for each channel."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    names = ("weight", "bias", "running_mean", "running_var")
    others = [ctx.fact(given[name]) for name in names if isinstance(given.get(name), Node)]
    for fact in (source, *others):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    known = isinstance(given.get("running_mean"), Node) and isinstance(given.get("running_var"), Node)
    if given.get("training") or given.get("use_input_stats") or not known or not is_tensor(node):
        return anything(node, f"{target_name(node)} over the batch", (source,))
    if not source.only_free(1) or not all(fact.level == Level.CONSTANT for fact in others):
        return anything(node, f"{target_name(node)} of {told(source)}", (source, *others))
    return replace(joined([source, *others]), dims=source.dims)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (f"aten::{name}" for name in ("softmax", "_softmax", "log_softmax", "_log_softmax", "glu")), _along
    ),
    **dict.fromkeys(("aten::layer_norm", "aten::rms_norm"), _norm),
    "aten::group_norm": _group_norm,
    "aten::batch_norm": _batch_norm,
}
