"""New tensors: of one value, or 0, 1, 2, ..

arange(S), with any constant start and step, is the position of each token. A list of all elements of rows x tokens is
their places, which are good as indices alone. Whatever else has the length as a number depends on the length.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import sympy
import torch
from torch.fx import Node

from kvcompile.passes.dependence.context import Context, Result, Rule, arguments, is_tensor
from kvcompile.passes.dependence.facts import Dim, Fact, Level, Reason, anything, joined
from kvcompile.passes.dependence.pointwise import as_values
from kvcompile.passes.dependence.reductions import POSITION
from kvcompile.passes.dependence.sizes import Size
from kvcompile.passes.dependence.sorting import located
from kvcompile.passes.graph import target_name

_COARSE = (torch.bfloat16, torch.float16)
_FAR = 2**17  # positions that are compared


def _filled(ctx: Context, node: Node) -> Result:
    """zeros, ones, full, empty and what is like them: one value throughout."""
    dims = ctx.created(node)
    if dims is None:
        return anything(node, "a size that is neither of rows nor of tokens")
    value = arguments(node).get("fill_value")
    if not isinstance(value, Node):
        return Fact(dims, Level.CONSTANT)
    found = ctx.fact(value)
    if found.level == Level.ANYTHING:
        return as_values(node, found)
    if found.level == Level.LENGTH and found.why is None:
        text = f"the sequence length enters {target_name(node)} as a number"
        found = replace(found, why=Reason(text, node))
    return replace(found.plain(), dims=dims, length=None if is_tensor(value) else found.length)


def _arange(ctx: Context, node: Node) -> Result:
    given = arguments(node)
    start, step = given.get("start", 0) or 0, given.get("step", 1)
    size = ctx.size(node.meta["val"].shape[0])
    if size is not None and not size.symbols and not node.all_input_nodes:
        return Fact(_dims(ctx, size), Level.CONSTANT)
    text = f"the sequence length enters {target_name(node)} as a number"
    if size is None or isinstance(start, Node) or isinstance(step, Node) or not size.symbols:
        return Fact(
            ctx.created(node) or (), Level.LENGTH if ctx.created(node) else Level.ANYTHING, Reason(text, node)
        )
    if size == Size(1, (ctx.seq,)):
        whole = isinstance(start, int) and isinstance(step, int) and node.meta["val"].dtype not in _COARSE
        value = sympy.Integer(start) + sympy.Integer(step) * POSITION if whole else None
        dtype = node.meta["val"].dtype
        limit = _rounded_alike(start, step, dtype) if dtype in _COARSE else None
        return Fact(_dims(ctx, size), Level.POSITION, limit=limit, length=value)
    roles = ctx.roles(size)
    if roles is None or start != 0 or step != 1:
        return anything(node, f"an arange over {size}")
    return located(node, roles, (roles,))


@cache
def _rounded_alike(start: float, step: float, dtype: torch.dtype) -> int | None:
    """Up to which length torch's own arange in half precision rounds each element as if it stood alone.

    It computes eight at a time from a rounded first one, where 4,113 becomes 4,096 and not 4,128.
    """
    alone = (torch.arange(_FAR, dtype=torch.float64) * step + start).to(dtype)
    whole = torch.arange(_FAR, dtype=torch.float64)[-1].item() * step + start
    own = torch.arange(start, whole + step / 2, step, dtype=dtype)
    length = min(len(own), _FAR)
    different = (own[:length] != alone[:length]).nonzero()
    return int(different[0]) if len(different) else None


def _dims(ctx: Context, size: Size) -> tuple[Dim, ...]:
    roles = ctx.roles(size)
    assert roles is not None
    return (roles,)


def _fixed(ctx: Context, node: Node) -> Result:
    """linspace, eye, tril_indices, window functions: constants, where their sizes are."""
    dims = ctx.created(node)
    if node.all_input_nodes or dims is None:
        return _arange_like(ctx, node)
    return Fact(dims, Level.CONSTANT)


def _arange_like(ctx: Context, node: Node) -> Fact:
    text = f"the sequence length enters {target_name(node)} as a number"
    return Fact(
        ctx.created(node) or (), Level.LENGTH if ctx.created(node) else Level.ANYTHING, Reason(text, node)
    )


def _scalar(ctx: Context, node: Node) -> Result:
    """scalar_tensor: a number as a tensor."""
    value = node.args[0]
    if not isinstance(value, Node):
        return Fact((), Level.CONSTANT)
    found = ctx.fact(value)
    text = f"the sequence length enters {target_name(node)} as a number"
    return replace(joined([found]), why=found.why or Reason(text, node), length=found.length)


def _triangle(ctx: Context, node: Node) -> Result:
    """tril, triu: of free dimensions; of a table over pairs of tokens, a table over pairs."""
    source = ctx.fact(node.args[0])
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    if isinstance(arguments(node).get("diagonal"), Node):
        return _arange_like(ctx, node)
    if source.only_free(-1) and source.only_free(-2):
        return source.plain()
    pairs = [[factor.role for factor in dim] for dim in source.dims[-2:]] == [["token"], ["token"]]
    if pairs and source.level <= Level.POSITION:
        return replace(source.plain(), level=Level.POSITION)
    return anything(node, "a triangle of tokens and something else", (source,))


_FILLED = ("zeros", "ones", "full", "empty", "empty_strided", "empty_permuted")
_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")
_NEW = ("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
SHAPE_ONLY = frozenset(f"aten::{name}" for name in (*_LIKE, *_NEW))
RULES: dict[str, Rule] = {
    **dict.fromkeys((f"aten::{name}" for name in (*_FILLED, *_LIKE, *_NEW)), _filled),
    "aten::arange": _arange,
    "aten::scalar_tensor": _scalar,
    **dict.fromkeys(
        (f"aten::{name}" for name in ("linspace", "logspace", "eye", "tril_indices", "hann_window")), _fixed
    ),
    **dict.fromkeys(("aten::tril", "aten::triu"), _triangle),
}
