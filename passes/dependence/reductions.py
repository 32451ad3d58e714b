"""Reductions: sums, means, maxima, norms, counts over dimensions.

Over free dimensions each token keeps its own. Over rows or tokens they mix; but the greatest position is the length,
which is a number that may be compared (`max(positions) + 1 > original_max`).
"""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments, is_tensor, whole_numbers
from kvcompile.passes.dependence.experts import added_up
from kvcompile.passes.dependence.facts import Choice, Dim, Fact, Level, N, Reason, anything, joined
from kvcompile.passes.dependence.pointwise import as_values, elementwise, told
from kvcompile.passes.graph import target_name

POSITION = sympy.Symbol("i", nonnegative=True, integer=True)  # the position of a token


def _reduce(ctx: Context, node: Node) -> Result:
    """A reduction over some dimensions, or over all."""
    given, name = arguments(node), target_name(node)
    if name in ("max", "min") and isinstance(given.get("other"), Node):
        return elementwise(ctx, node, node.all_input_nodes)
    source = ctx.fact(node.args[0])
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    several = not is_tensor(node)
    wanted = given.get("dim", given.get("dims"))
    chosen = [] if wanted is None else whole_numbers(wanted)
    if chosen is None:
        return anything(node, "over computed dimensions", (source,))
    size = len(source.dims)
    gone = {dim % size for dim in chosen} if chosen else set(range(size))
    keep = bool(given.get("keepdim", False))
    dims: list[Dim] = []
    for place, dim in enumerate(source.dims):
        if place not in gone:
            dims.append(dim)
        elif keep:
            dims.append(())
    if not all(source.only_free(dim) for dim in gone):
        refused = _of_tokens(node, source, tuple(dims))
        return added_up(source, gone, refused) if name == "sum" and not keep else refused
    found = replace(source.plain(), dims=tuple(dims))
    if name in ("argmax", "argmin") or (several and name in ("max", "min", "median", "kthvalue", "mode")):
        picked = replace(found, knows=_picked(source, gone))
        return (found, picked) if several else picked
    return (found, found) if several else found


def _picked(source: Fact, gone: set[int]) -> Choice | None:
    count = 1
    for dim in gone:
        for factor in source.dims[dim]:
            count *= factor.size.number
    return Choice(count)


def _of_tokens(node: Node, source: Fact, dims: tuple[Dim, ...]) -> Fact:
    """Over rows or tokens: the greatest position is a length, all else mixes them."""
    name = target_name(node)
    value = source.length
    if source.level == Level.POSITION and name in ("max", "amax") and value is not None and is_tensor(node):
        slope = sympy.Poly(value, POSITION).coeff_monomial(POSITION) if value.free_symbols else 0
        if slope > 0 and not any(factor.role != "free" for dim in dims for factor in dim):
            text = "the greatest position, which is the length of the sequence, enters as a number"
            longest = sympy.expand(value.subs(POSITION, N - 1))
            found = joined([source, Fact((), Level.LENGTH, Reason(text, node))])
            return replace(found, dims=dims, length=longest)
    what = "the sequence" if any(f.role == "token" for f in source.factors()) else "the rows of the batch"
    return anything(node, f"{name} of {told(source)} over {what}", (source,))


_NAMES = (
    *(
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "any",
        "all",
        "logsumexp",
        "prod",
        "argmax",
        "argmin",
        "nansum",
    ),
    *(
        "nanmean",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "norm",
        "linalg_vector_norm",
        "median",
        "nanmedian",
        "mode",
    ),
    *("count_nonzero", "special_logsumexp", "kthvalue"),
)
RULES: dict[str, Rule] = dict.fromkeys((f"aten::{name}" for name in _NAMES), _reduce)
