"""Slices and parts: a piece of a dimension, and a piece put back.

Of free dimensions any piece will do. Along the tokens only the whole: a shifted or shortened sequence has no token at
its own place. `table[a : a + S]` of a constant gives token i row a + i, so it is a function of the position. The last
token alone (`x[:, -1]`) is its own level.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments, is_tensor
from kvcompile.passes.dependence.experts import one_count, parts
from kvcompile.passes.dependence.facts import (
    Choice,
    Counts,
    Dim,
    Fact,
    Factor,
    Level,
    Reason,
    anything,
    compact,
    joined,
)
from kvcompile.passes.dependence.pointwise import aligned, as_values, told
from kvcompile.passes.dependence.sizes import Size
from kvcompile.passes.graph import expr, target_name

_END = 2**62  # what stands for "to the end"


def _slice(ctx: Context, node: Node) -> Result:
    """slice, narrow."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    dim = int(given["dim"]) % len(source.dims)
    before, after = (node_.meta["val"].shape[dim] for node_ in (node.args[0], node))  # type: ignore[union-attr]
    start = given.get("start")
    step = given.get("step", 1)
    if expr(before) == expr(after) and step == 1:
        return source
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    shortened = ctx.size(after)
    own, plain = source.dims[dim], replace(source.plain(), knows=_choice(source))
    if isinstance(start, Node):
        return _by_length(node, source)
    if all(factor.role == "free" for factor in own):
        return _of_free(ctx, node, plain, dim, shortened, start or 0, step)
    if own == (_tokens(ctx),) and shortened == Size(1) and _last(given, target_name(node)):
        return _last_token(plain, _with(plain.dims, dim, ()), node)
    what = (
        "the sequence"
        if any(f.role in ("token", "keep") for f in source_factors(own))
        else "the rows of the batch"
    )
    return anything(node, f"a slice along {what}", (source,))


def source_factors(dim: Dim) -> list[Factor]:
    """The factors of a dimension, of sorted lists those that are sorted."""
    return [inner for factor in dim for inner in (factor.of or (factor,))]


def _of_free(
    ctx: Context, node: Node, source: Fact, dim: int, size: Size | None, start: int, step: object
) -> Fact:
    """A slice of a dimension that runs over neither rows nor tokens."""
    if size is None:
        return anything(
            node, "a slice whose length depends on the sequence in another way than being it", (source,)
        )
    if not size.symbols:
        end = arguments(node).get("end")
        if isinstance(end, Node) and not _reaches(end):
            return _by_length(node, source)
        return replace(source, dims=_with(source.dims, dim, _free(size)))
    if size != Size(1, (ctx.seq,)) or step != 1 or start < 0 or source.level != Level.CONSTANT:
        return anything(node, f"a slice of {told(source)} to {size}", (source,))
    return replace(source, level=Level.POSITION, dims=_with(source.dims, dim, (_tokens(ctx),)), knows=None)


def _reaches(end: Node) -> bool:
    """Whether a computed end is a plain number after all."""
    value = end.meta.get("val")
    return isinstance(value, int) or not expr(value).free_symbols


def _by_length(node: Node, source: Fact) -> Fact:
    text = f"the sequence length enters {target_name(node)} as a number"
    found = joined([source, Fact((), Level.LENGTH, Reason(text, node))])
    return replace(found, dims=source.dims) if found.level == Level.LENGTH else found


def _tokens(ctx: Context) -> Factor:
    return Factor("token", Size(1, (ctx.seq,)))


def _free(size: Size) -> Dim:
    return compact((Factor("free", size),))


def _with(dims: tuple[Dim, ...], place: int, dim: Dim) -> tuple[Dim, ...]:
    return (*dims[:place], dim, *dims[place + 1 :])


def _choice(source: Fact) -> Choice | None:
    """Some of the choices are choices still."""
    return Choice(source.knows.count) if isinstance(source.knows, Choice) else None


def _last(given: dict[str, Any], name: str) -> bool:
    if name == "select":
        return bool(given["index"] == -1)
    ends = given.get("end") is None or (isinstance(given.get("end"), int) and given["end"] >= _END)
    return given.get("start") == -1 and (name == "narrow" or ends)


def _last_token(source: Fact, dims: tuple[Dim, ...], node: Node) -> Fact:
    """What is left of [.., tokens, ..] is the last token's; of a function of positions, that is the length."""
    if source.level == Level.CONSTANT:
        return replace(source, dims=dims)
    if source.level == Level.TOKEN:
        return replace(source, level=Level.LAST, dims=dims)
    return anything(node, "the last position stands for the length of the sequence", (source,))


def _select(ctx: Context, node: Node) -> Result:
    source, given = ctx.fact(node.args[0]), arguments(node)
    dim, index = int(given["dim"]) % len(source.dims), given["index"]
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    rest = (*source.dims[:dim], *source.dims[dim + 1 :])
    own, plain = source.dims[dim], replace(source.plain(), knows=_choice(source))
    if isinstance(index, Node):
        if own != (_tokens(ctx),) or expr(index.meta["val"]) != ctx.seq - 1:
            return _by_length(node, replace(source, dims=rest))
        index = given["index"] = -1
    if all(factor.role == "free" for factor in own):
        return replace(plain, dims=rest)
    if own == (_tokens(ctx),) and _last(given, "select"):
        return _last_token(plain, rest, node)
    if any(factor.role in ("token", "keep") for factor in source_factors(own)):
        return anything(node, f"token {index} is taken for all", (source,))
    return anything(node, f"row {index} of the batch is taken for all", (source,))


def _parts(ctx: Context, node: Node) -> Result:
    """split, split_with_sizes, chunk, unbind, tensor_split: the parts of a free dimension."""
    source, given = ctx.fact(node.args[0]), arguments(node)
    dim = int(given["dim"]) % len(source.dims)
    values = node.meta["val"]
    if isinstance(source.knows, Counts) and target_name(node) == "unbind":
        return tuple(
            replace(source, dims=(), knows=one_count(source.knows, place)) for place in range(len(values))
        )
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    if target_name(node) == "split_with_sizes" and source.level <= Level.TOKEN:
        pieces = parts(ctx, node, source, list(given["split_sizes"]), dim)
        if pieces is not None:
            return pieces
    if any(isinstance(argument, Node) for argument in node.all_input_nodes[1:]):
        return anything(node, "parts of a computed size", (source,))
    if not source.only_free(dim):
        if len(values) == 1 and target_name(node) != "unbind":
            return (source,)
        return anything(node, f"it takes {told(source)} apart along rows or tokens", (source,))
    plain = replace(source.plain(), knows=_choice(source))
    found: list[Fact] = []
    for value in values:
        if target_name(node) == "unbind":
            dims = (*source.dims[:dim], *source.dims[dim + 1 :])
        else:
            size = ctx.size(value.shape[dim])
            if size is None or size.symbols:
                return anything(node, "parts whose length depends on the sequence", (source,))
            dims = _with(source.dims, dim, _free(size))
        found.append(replace(plain, dims=dims))
    return tuple(found)


def _put_back(ctx: Context, node: Node) -> Result:
    """slice_scatter, select_scatter: a copy with another piece of a free dimension (or all of another one)."""
    given = arguments(node)
    target, piece = (ctx.fact(node.args[place]) for place in (0, 1))
    dim, name = int(given["dim"]) % len(target.dims), target_name(node)
    unusable = next((fact for fact in (target, piece) if fact.level == Level.ANYTHING), None)
    if unusable is not None:
        return as_values(node, unusable)
    if any(isinstance(given.get(key), Node) for key in ("start", "end", "index")):
        return _by_length(node, joined([target, piece]))
    source = node.args[1]
    assert isinstance(source, Node) and is_tensor(source)
    placed = piece.dims
    if name == "select_scatter":
        placed = (*piece.dims[:dim], (), *piece.dims[dim:])
    sizes: list[torch.SymInt | int] = (
        [n.meta["val"].shape[dim] for n in (node, source)] if (name == "slice_scatter") else []
    )
    whole = len(sizes) == 2 and expr(sizes[0]) == expr(sizes[1])
    if not target.only_free(dim) and not whole:
        return anything(
            node, f"it writes into a part of {told(target)} along rows or tokens", (target, piece)
        )
    if whole and placed[dim] != target.dims[dim]:
        return anything(node, f"it writes {told(piece)} into {told(target)}", (target, piece))
    others = [_with(target.dims, dim, ()), _with(placed, dim, ())]
    dims = aligned(others, len(target.dims))
    if dims is None or (not all(factor.role == "free" for factor in placed[dim]) and not whole):
        return anything(node, f"it writes {told(piece)} into {told(target)}", (target, piece))
    return replace(joined([target, piece]), dims=_with(dims, dim, target.dims[dim]))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten::slice", "aten::narrow"), _slice),
    "aten::select": _select,
    **dict.fromkeys(
        (f"aten::{name}" for name in ("split", "split_with_sizes", "chunk", "unbind", "tensor_split")),
        _parts,
    ),
    **dict.fromkeys(("aten::slice_scatter", "aten::select_scatter"), _put_back),
}
