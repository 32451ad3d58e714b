"""Views: the same elements in other dimensions.

A reshape regroups the row-major list of factors. Free ones may be split and joined; rows and tokens may stand beside
others in one dimension ([B * S, D]), but what cuts a row or a token apart is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from kvcompile.passes.dependence.context import (
    Context,
    Result,
    Rule,
    arguments,
    nodes_in,
    rank,
    whole_numbers,
)
from kvcompile.passes.dependence.facts import Choice, Dim, Fact, Factor, Level, anything, compact
from kvcompile.passes.dependence.pointwise import aligned, as_values, told
from kvcompile.passes.dependence.sizes import ONE, Size
from kvcompile.passes.graph import target_name


def regrouped(factors: Sequence[Factor], sizes: Sequence[Size]) -> tuple[Dim, ...] | None:
    """The factors in dimensions of these sizes, in order; None where a dimension would end inside one."""
    rest = list(compact(factors))
    found: list[Dim] = []
    for size in sizes:
        taken: list[Factor] = []
        while size != ONE:
            if not rest:
                return None
            head = rest.pop(0)
            whole = size.over(head.size)
            if whole is not None:
                taken.append(head)
                size = whole
                continue
            # A free factor may be cut: its first part here, the rest in the dimensions that follow.
            part = None if size.symbols or head.role != "free" else head.size.over(size)
            if part is None:
                return None
            taken.append(Factor("free", size))
            rest.insert(0, Factor("free", part))
            size = ONE
        found.append(compact(taken))
    return tuple(found) if not rest else None


def _view(ctx: Context, node: Node) -> Result:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: the result's own shape says all."""
    source = ctx.fact(node.args[0])
    sizes = ctx.sizes(node)
    flat = [factor for dim in source.dims for factor in dim]
    dims = None if sizes is None else regrouped(flat, sizes)
    if dims is None:
        return anything(
            node, f"it cuts {told(source)} into {list(map(str, node.meta['val'].shape))}", (source,)
        )
    return _same_elements(source, dims, node)


def _same_elements(source: Fact, dims: tuple[Dim, ...], node: Node) -> Fact:
    if source.level == Level.ANYTHING and source.knows is None:
        return as_values(node, source)
    return replace(source, dims=dims)


def _permute(ctx: Context, node: Node) -> Result:
    """permute, transpose, t, movedim: other places for the same dimensions."""
    source, name = ctx.fact(node.args[0]), target_name(node)
    given, size = arguments(node), rank(node)
    order = list(range(size))
    if name == "permute":
        wanted = whole_numbers(given["dims"])
        if wanted is None:
            return anything(node, "dimensions that are computed", (source,))
        order = [dim % size for dim in wanted]
    elif name in ("transpose", "swapaxes", "swapdims", "t", "mT", "adjoint"):
        first, second = (-2, -1) if name in ("mT", "adjoint") else (0, size - 1)
        if name in ("transpose", "swapaxes", "swapdims"):
            first, second = node.args[1:3]  # type: ignore[assignment]
        if size > 1:
            order[first % size], order[second % size] = order[second % size], order[first % size]
    elif name == "numpy_T":
        order.reverse()
    elif name in ("movedim", "moveaxis"):
        sources, targets = (whole_numbers(node.args[place]) for place in (1, 2))
        if sources is None or targets is None:
            return anything(node, "dimensions that are computed", (source,))
        pairs = sorted((b % size, a % size) for a, b in zip(sources, targets, strict=True))
        order = [dim for dim in order if dim not in {a for _, a in pairs}]
        for place, dim in pairs:
            order.insert(place, dim)
    return _same_elements(source, tuple(source.dims[dim] for dim in order), node)


def _expand(ctx: Context, node: Node) -> Result:
    """expand, expand_as, broadcast_to: dimensions of size one become longer, with the same value throughout."""
    source = ctx.fact(node.args[0])
    created = ctx.created(node)
    if created is None:
        return anything(node, "it has a size that is neither of rows nor of tokens", (source,))
    before = ((),) * (len(created) - len(source.dims)) + source.dims
    dims = tuple(old or new for old, new in zip(before, created, strict=True))
    return _same_elements(source, dims, node)


def _repeat(ctx: Context, node: Node) -> Result:
    """repeat, tile: copies one after another; of rows and tokens only as a dimension in front of them."""
    source = ctx.fact(node.args[0])
    sizes = ctx.sizes(node)
    if sizes is None:
        return anything(node, "it has a size that is neither of rows nor of tokens", (source,))
    before = ((),) * (len(sizes) - len(source.dims)) + source.dims
    dims: list[Dim] = []
    for dim, size in zip(before, sizes, strict=True):
        own = ONE
        for factor in dim:
            own = own * factor.size
        times = size.over(own)
        copies = None if times is None else ctx.roles(times)
        if copies is None:
            return anything(node, f"it repeats {told(source)}", (source,))
        dims.append(compact((*copies, *dim)))
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    return replace(source.plain(), dims=tuple(dims), knows=_choice(source))


def _repeat_interleave(ctx: Context, node: Node) -> Result:
    """Each element several times, one beside the other."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    times, dim = given.get("repeats"), given.get("dim")
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    if not isinstance(times, int) or not isinstance(dim, int):
        return anything(node, "how often elements are repeated is computed, or they are flattened", (source,))
    dims = list(source.dims)
    dims[dim] = compact((*dims[dim], *((Factor("free", Size(times)),) if times != 1 else ())))
    return replace(source.plain(), dims=tuple(dims), knows=_choice(source))


def _choice(source: Fact) -> Choice | None:
    """Copies of choices are choices, and no longer each of them once."""
    return Choice(source.knows.count) if isinstance(source.knows, Choice) else None


def _complex(ctx: Context, node: Node) -> Result:
    """view_as_complex, view_as_real: the last dimension, of two numbers, goes or comes."""
    source = ctx.fact(node.args[0])
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    pair = Factor("free", Size(2))
    if target_name(node) == "view_as_real":
        return replace(source.plain(), dims=(*source.dims, (pair,)))
    if source.dims[-1] != (pair,):
        return anything(node, "its pairs are no dimension of their own", (source,))
    return replace(source.plain(), dims=source.dims[:-1])


def _diagonal(ctx: Context, node: Node) -> Result:
    """diagonal of two free dimensions."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    first, second = (given[name] % len(source.dims) for name in ("dim1", "dim2"))
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    if not (source.only_free(first) and source.only_free(second)):
        return anything(node, f"the diagonal of {told(source)}", (source,))
    size = ctx.size(node.meta["val"].shape[-1])
    if size is None or size.symbols:
        return anything(node, f"the diagonal of {told(source)}", (source,))
    kept = [dim for place, dim in enumerate(source.dims) if place not in (first, second)]
    return replace(source.plain(), dims=(*kept, compact((Factor("free", size),))))


def _broadcast(ctx: Context, node: Node) -> Result:
    """broadcast_tensors: all of them in the dimensions of all together."""
    sources = [ctx.fact(each) for each in nodes_in(node.args[0])]
    values = node.meta["val"]
    dims = aligned([fact.dims for fact in sources], values[0].dim())
    unusable = next((fact for fact in sources if fact.level == Level.ANYTHING), None)
    if unusable is not None or dims is None:
        return anything(node, f"it aligns {' with '.join(map(told, sources))}", sources)
    return tuple(replace(fact.plain(), dims=dims) for fact in sources)


_REGROUP = (
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"),
    *("reshape_as", "ravel", "atleast_1d", "atleast_2d", "atleast_3d"),
)
_ORDER = (
    "permute",
    "transpose",
    "swapaxes",
    "swapdims",
    "t",
    "mT",
    "adjoint",
    "numpy_T",
    "movedim",
    "moveaxis",
)
RULES: dict[str, Rule] = {
    **dict.fromkeys((f"aten::{name}" for name in _REGROUP), _view),
    **dict.fromkeys((f"aten::{name}" for name in _ORDER), _permute),
    **dict.fromkeys(("aten::expand", "aten::expand_as", "aten::broadcast_to"), _expand),
    **dict.fromkeys(("aten::repeat", "aten::tile"), _repeat),
    "aten::repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("aten::view_as_complex", "aten::view_as_real"), _complex),
    "aten::diagonal": _diagonal,
    "aten::broadcast_tensors": _broadcast,
}
