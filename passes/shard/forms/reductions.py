"""Reductions: whole in the dimensions over which they reduce, or along which elements meet."""

from __future__ import annotations

from torch.fx import Node

from kvcompile.passes.dependence.context import arguments, whole_numbers
from kvcompile.passes.shard.form import Form, sizes
from kvcompile.passes.shard.ties import along


def _reduce(node: Node) -> Form | None:
    """sum, mean, amax(x, dims, keepdim)"""
    source, given = node.args[0], arguments(node)
    assert isinstance(source, Node)
    fixed, result = sizes(source), sizes(node)
    dim = given.get("dim")
    dims = [dim] if isinstance(dim, int) else whole_numbers(dim)
    if not dims:
        return None
    gone = {d % len(fixed) for d in dims}
    kept = len(result) == len(fixed)
    pairs = [
        (d, d if kept else d - sum(g < d for g in gone))
        for d, size in enumerate(fixed)
        if d not in gone and size is not None
    ]
    return Form(along(source, pairs))


def _along_one(node: Node) -> Form | None:
    """softmax, cumsum(x, dim): each line along one dimension by itself."""
    source, dim = node.args[0], arguments(node).get("dim")
    if not isinstance(source, Node) or not isinstance(dim, int):
        return None
    fixed = sizes(source)
    dim %= len(fixed)
    return Form(along(source, [(d, d) for d, size in enumerate(fixed) if d != dim and size is not None]))


def _norm(node: Node) -> Form | None:
    """layer_norm, rms_norm(x, normalized_shape, weight, bias): over the last dimensions."""
    source, over = node.args[:2]
    if not isinstance(source, Node) or not isinstance(over, (list, tuple)):
        return None
    fixed = sizes(source)
    free = len(fixed) - len(over)
    return Form(along(source, [(d, d) for d in range(free) if fixed[d] is not None]))


_REDUCE = ("sum", "mean", "amax", "amin", "prod", "var", "std", "logsumexp", "linalg_vector_norm", "argmax")
RULES = {
    **dict.fromkeys((f"aten::{name}" for name in _REDUCE), _reduce),
    **dict.fromkeys(
        (f"aten::{name}" for name in ("softmax", "_softmax", "log_softmax", "cumsum")), _along_one
    ),
    **dict.fromkeys((f"aten::{name}" for name in ("layer_norm", "rms_norm")), _norm),
}
