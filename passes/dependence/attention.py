"""Attention, and modules that run as Python.

A block that detection found is cut: its result is a value of each token; `kvcompile::attention` is what it becomes. A
module with a carried state is cut, too, where each of its inputs is local. Of other modules that run as Python nothing
is known: their results are taken to be local where what they are given is, and `Fact.opaque` says that this is to be
checked by running.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from kvcompile.kernels.ops.opaque import TensorSpec, find
from kvcompile.passes.dependence.context import Context, Result, Rule, arguments, nodes_in
from kvcompile.passes.dependence.facts import Dim, Fact, Factor, Level, anything, joined, settled
from kvcompile.passes.dependence.pointwise import aligned, as_values, told
from kvcompile.passes.dependence.sizes import ONE, Size
from kvcompile.passes.graph import shape


def cut(ctx: Context, node: Node) -> Fact:
    """The result of an attention block: rows, tokens and free dimensions, as its shape says.

    Heads beside rows in one dimension ([B * H, S, D]) may stand before or behind them: that is as in its operands.
    """
    sizes = ctx.sizes(node)
    dims: list[Dim] = []
    for place, size in enumerate(sizes or ()):
        roles = ctx.roles(size)
        if roles is not None and len(roles) > 1:
            roles = _as_operands(ctx, node, place, size)
        if roles is None:
            return anything(node, "a result of attention whose dimensions are not told apart")
        dims.append(roles)
    if sizes is None:
        return anything(node, "a result of attention whose dimensions are not told apart")
    return settled(Fact(tuple(dims), Level.TOKEN), node)


def _as_operands(ctx: Context, node: Node, place: int, size: Size) -> Dim | None:
    for operand in node.all_input_nodes:
        fact = ctx.facts.get(operand)
        if isinstance(fact, Fact) and len(fact.dims) == len(shape(node)):
            whole = ONE
            for factor in fact.dims[place]:
                whole = whole * factor.size
            if whole == size:
                return fact.dims[place]
    return None


def _attention(ctx: Context, node: Node) -> Result:
    return cut(ctx, node)


def _sdpa(ctx: Context, node: Node) -> Result:
    """scaled_dot_product_attention over keys that are no tokens: heads, channels, or a table of constants."""
    given = arguments(node)
    operands = [given[name] for name in ("query", "key", "value")]
    q, k, v = (ctx.fact(each) for each in operands)
    mask = ctx.fact(given["attn_mask"]) if isinstance(given["attn_mask"], Node) else None
    facts = [q, k, v, *([] if mask is None else [mask])]
    unusable = next((fact for fact in facts if fact.level == Level.ANYTHING), None)
    if unusable is not None:
        return as_values(node, unusable)
    ordered = given["is_causal"] and not q.only_free(-2)
    if not (k.only_free(-2) and v.only_free(-2) and q.only_free(-1)) or ordered or given["dropout_p"]:
        return anything(node, "attention over the sequence that is no block of the model's cache", facts)
    if given["enable_gqa"] or isinstance(given["scale"], Node):
        return anything(node, "attention over something else than the sequence, in groups of heads", facts)
    batch = aligned([fact.dims[:-2] for fact in facts], len(q.dims) - 2)
    rows = None if mask is None else aligned([mask.dims[-2:], (q.dims[-2], k.dims[-2])], 2)
    if batch is None or (mask is not None and rows is None):
        return anything(node, f"it aligns {' with '.join(map(told, facts))}", facts)
    return replace(joined(facts), dims=(*batch, q.dims[-2], v.dims[-1]))


def _opaque(ctx: Context, node: Node) -> Result:
    key = str(node.args[1])
    record = find(key)
    facts = [ctx.fact(each) for each in nodes_in(node.args[0])]
    found = joined(facts)
    if found.level > Level.TOKEN:
        return anything(
            node, f"{record.path}, which runs as Python, takes values that are not one token's", facts
        )
    if record.state is not None:
        found = replace(found, level=Level.TOKEN, states=found.states | {node})
    else:
        found = replace(found, opaque=found.opaque | {key})
    return tuple(_result(ctx, node, spec, found, record.path) for spec in record.outputs)


def _result(ctx: Context, node: Node, spec: TensorSpec, found: Fact, path: str) -> Fact:
    dims: list[Dim] = []
    rows, tokens = Factor("batch", Size(1, (ctx.batch,))), Factor("token", Size(1, (ctx.seq,)))
    bases: dict[str, Dim] = {"": (), "B": (rows,), "S": (tokens,), "BS": (rows, tokens)}
    for dim in spec.dims:
        if dim.base and dim.factor != 1:
            return anything(node, f"a result of {path} has a dimension of rows or tokens and something else")
        dims.append(
            bases[dim.base] if dim.base else ((Factor("free", Size(dim.factor)),) if dim.factor != 1 else ())
        )
    placed = replace(found, dims=tuple(dims))
    if placed.level == Level.TOKEN and not placed.count("token"):
        return anything(
            node,
            f"a result of the recurrent {path} is for all tokens"
            if found.states
            else f"a result of {path} is for all tokens",
        )
    return settled(placed, node)


RULES: dict[str, Rule] = {
    "kvcompile::attention": _attention,
    "kvcompile::opaque": _opaque,
    "aten::scaled_dot_product_attention": _sdpa,
}
