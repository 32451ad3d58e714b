"""Cumulative operators: cumsum, cumprod, cummax, logcumsumexp, diff.

Over free dimensions only; but sums of integers [B, S] along the sequence are carried from token to token
(`passes/rewrite/running_sum.py`). And the ends of groups of experts are a sum of counts, over experts.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments, is_tensor
from kvcompile.passes.dependence.facts import Counts, Factor, Level, anything, compact
from kvcompile.passes.dependence.pointwise import as_values, told
from kvcompile.passes.graph import target_name
from kvcompile.passes.rewrite.running_sum import is_running_sum


def _cumulative(ctx: Context, node: Node) -> Result:
    source, given = ctx.fact(node.args[0]), arguments(node)
    name = target_name(node)
    if name == "cumsum" and isinstance(source.knows, Counts) and not source.knows.summed:
        return replace(source, knows=Counts(source.knows.count, source.knows.origin, summed=True))
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    dim = int(given["dim"]) % max(len(source.dims), 1)
    if not source.dims or source.only_free(dim):
        found = source.plain()
        return found if is_tensor(node) else (found, found)
    if is_running_sum(node) and _rows_and_tokens(source.dims) and source.level <= Level.TOKEN:
        return replace(source.plain(), level=Level.TOKEN, states=source.states | {node})
    return anything(node, f"{name} of {told(source)} along rows or tokens", (source,))


def _rows_and_tokens(dims: tuple[tuple[Factor, ...], ...]) -> bool:
    return [[factor.role for factor in dim] for dim in dims] == [["batch"], ["token"]]


def _carried(ctx: Context, node: Node) -> Result:
    """kvcompile::running_sum: what `passes/rewrite/running_sum.py` made of a sum."""
    source = ctx.fact(node.args[0])
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    if not _rows_and_tokens(source.dims) or source.level > Level.TOKEN:
        return anything(node, f"a running sum of {told(source)}", (source,))
    return replace(source.plain(), level=Level.TOKEN, states=source.states | {node})


def _diff(ctx: Context, node: Node) -> Result:
    """Differences of neighbours, along a free dimension."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    dim = int(given["dim"]) % len(source.dims)
    length = ctx.size(node.meta["val"].shape[dim])
    extra = given.get("prepend") is not None or given.get("append") is not None
    if not source.only_free(dim) or length is None or length.symbols or extra:
        return anything(node, f"differences of {told(source)} along rows or tokens", (source,))
    dims = (*source.dims[:dim], compact((Factor("free", length),)), *source.dims[dim + 1 :])
    return replace(source.plain(), dims=dims)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (f"aten::{name}" for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")), _cumulative
    ),
    "aten::diff": _diff,
    "kvcompile::running_sum": _carried,
}
