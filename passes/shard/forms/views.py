"""Views: the same elements in other dimensions."""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx import Node

from kvcompile.passes.dependence.context import arguments, rank, whole_numbers
from kvcompile.passes.graph import expr, shape, target_name
from kvcompile.passes.shard.form import Form, Where, pairs_from_right, sizes
from kvcompile.passes.shard.ties import Regroup, Repeat, Tie, along


def groups(before: list[sympy.Expr], after: list[sympy.Expr]) -> list[tuple[list[int], list[int]]]:
    """The least groups of dimensions, in order, whose products are equal: ([of before], [of after])."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        a, b = before[i], after[j]
        while sympy.cancel(a - b) != 0:
            if _divides(a, b) and left[-1] + 1 < len(before):
                left.append(left[-1] + 1)
                a = a * before[left[-1]]
            elif _divides(b, a) and right[-1] + 1 < len(after):
                right.append(right[-1] + 1)
                b = b * after[right[-1]]
            elif left[-1] + 1 < len(before):
                left.append(left[-1] + 1)
                a = a * before[left[-1]]
            elif right[-1] + 1 < len(after):
                right.append(right[-1] + 1)
                b = b * after[right[-1]]
            else:
                return found
        found.append((left, right))
        i, j = left[-1] + 1, right[-1] + 1
    return found  # what is left has size one


def _divides(a: sympy.Expr, b: sympy.Expr) -> bool:
    if a.is_Integer and b.is_Integer:
        return bool(b % a == 0) and a != b
    return bool(sympy.fraction(sympy.cancel(b / a))[1] == 1)


def _regroup(node: Node) -> Form | None:
    """view, reshape, flatten, squeeze, unsqueeze: groups of dimensions with the same product."""
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = ([expr(dim) for dim in shape(each)] for each in (source, node))
    ties = []
    for left, right in groups(before, after):
        own = [before[dim] for dim in left], [after[dim] for dim in right]
        if all(size.is_Integer for side in own for size in side):
            how = Regroup(*(tuple(map(int, side)) for side in own))
            ties.append(Tie(source, tuple(left), tuple(right), how))
    return Form(tuple(ties), rewrite=_SIZES.get(target_name(node)))


def _shape_argument(where: Where, args: list[Any], kwargs: dict[str, Any]) -> None:
    """reshape, view, expand(x, sizes)"""
    args[1] = _local(list(args[1]), where)


def _sizes_argument(where: Where, args: list[Any], kwargs: dict[str, Any]) -> None:
    """unflatten(x, dim, sizes)"""
    given = list(args[2])
    dim = args[1] % (len(where.result) - len(given) + 1)
    cuts = where.result[dim : dim + len(given)]
    args[2] = [_one(size, cut, where.rank) for size, cut in zip(given, cuts, strict=True)]


def _local(given: list[Any], where: Where) -> list[Any]:
    return [_one(size, cut, where.rank) for size, cut in zip(given, where.result, strict=True)]


def _one(size: Any, cut: Any, rank: int) -> Any:
    return size if cut is None or size == -1 else cut.count(rank)


_SIZES = {"reshape": _shape_argument, "view": _shape_argument, "_unsafe_view": _shape_argument}
_SIZES |= {"unflatten": _sizes_argument}


def _permute(node: Node) -> Form | None:
    """permute, transpose, t, movedim: other places for the same dimensions."""
    source, name, size = node.args[0], target_name(node), rank(node)
    assert isinstance(source, Node)
    order = list(range(size))
    if name == "permute":
        wanted = whole_numbers(arguments(node)["dims"])
        if wanted is None:
            return None
        order = [dim % size for dim in wanted]
    else:
        first, second = (-2, -1) if name in ("mT", "adjoint") else (0, size - 1)
        if name in ("transpose", "swapaxes", "swapdims"):
            first, second = node.args[1:3]  # type: ignore[assignment]
        if size > 1:
            order[first % size], order[second % size] = order[second % size], order[first % size]
    fixed = sizes(source)
    return Form(along(source, [(dim, place) for place, dim in enumerate(order) if fixed[dim] is not None]))


def _expand(node: Node) -> Form | None:
    """expand: dimensions of size one become longer; a rank's are as long as what they meet there."""
    source = node.args[0]
    assert isinstance(source, Node)
    return Form(along(source, pairs_from_right(source, sizes(node))), rewrite=_shape_argument)


def _repeat_interleave(node: Node) -> Form | None:
    """Each element several times, one beside the other."""
    source, given = node.args[0], arguments(node)
    times, dim = given.get("repeats"), given.get("dim")
    if not (isinstance(source, Node) and isinstance(times, int) and isinstance(dim, int)):
        return None
    fixed = sizes(source)
    dim %= len(fixed)
    ties = along(source, [(d, d) for d, size in enumerate(fixed) if d != dim and size is not None])
    own = fixed[dim]
    return Form(ties if own is None else (*ties, Tie(source, (dim,), (dim,), Repeat(own, times))))


_REGROUP = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
_ORDER = ("permute", "transpose", "swapaxes", "swapdims", "t", "mT", "adjoint", "numpy_T")
RULES = {
    **dict.fromkeys((f"aten::{name}" for name in _REGROUP), _regroup),
    **dict.fromkeys((f"aten::{name}" for name in _ORDER), _permute),
    "aten::expand": _expand,
    "aten::repeat_interleave": _repeat_interleave,
}
