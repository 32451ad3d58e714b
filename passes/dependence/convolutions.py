"""Convolutions and pooling: over free dimensions, or with a kernel of one token, which is a product."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments
from kvcompile.passes.dependence.facts import Dim, Factor, Level, anything, compact, joined
from kvcompile.passes.dependence.pointwise import as_values, told
from kvcompile.passes.graph import shape, target_name


def _convolution(ctx: Context, node: Node) -> Result:
    """x [N, C, ..], weight [out, C / groups, kernel ..] -> [N, out, ..]"""
    given = arguments(node)
    source, weight = ctx.fact(node.args[0]), ctx.fact(node.args[1])
    bias = ctx.fact(given.get("bias")) if isinstance(given.get("bias"), Node) else None
    for fact in (source, weight, *([] if bias is None else [bias])):
        if fact.level == Level.ANYTHING:
            return as_values(node, fact)
    assert isinstance(node.args[1], Node)
    kernel = shape(node.args[1])[2:]
    spatial = len(kernel)
    facts = (source, weight, *([] if bias is None else [bias]))
    if given.get("transposed") or weight.level != Level.CONSTANT or (bias and bias.level != Level.CONSTANT):
        return anything(node, f"a convolution of {told(source)}", facts)
    if isinstance(given.get("padding"), str) or len(source.dims) != spatial + 2 or not source.only_free(1):
        return anything(node, f"a convolution of {told(source)}", facts)
    channels = ctx.size(node.meta["val"].shape[1])
    if channels is None or channels.symbols:
        return anything(node, f"a convolution of {told(source)}", facts)
    dims: list[Dim] = [source.dims[0], compact((Factor("free", channels),))]
    for place in range(spatial):
        own = source.dims[2 + place]
        alone = (
            kernel[place] == 1 and _each(given["stride"], place) == 1 and _each(given["padding"], place) == 0
        )
        if alone:
            dims.append(own)
            continue
        size = ctx.size(node.meta["val"].shape[2 + place])
        if not source.only_free(2 + place) or size is None or size.symbols:
            taps = f"a kernel of {kernel[place]}, dilated by {_each(given['dilation'], place)}"
            return anything(node, f"{target_name(node)} with {taps} over {told(source)}", facts)
        dims.append(compact((Factor("free", size),)))
    return replace(joined(facts), dims=tuple(dims))


def _each(values: object, place: int) -> object:
    """stride, padding, dilation: one for all dimensions or one for each."""
    if isinstance(values, (list, tuple)):
        return values[place] if len(values) > 1 else values[0]
    return values


RULES: dict[str, Rule] = dict.fromkeys(
    ("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution"), _convolution
)
