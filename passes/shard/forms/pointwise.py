"""Pointwise operators: the operands line up from the right, and those of size one are the same for all."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from kvcompile.passes.dependence.pointwise import NAMES
from kvcompile.passes.shard.form import Form, pairs_from_right, sizes
from kvcompile.passes.shard.ties import along

# Their values are a number, whatever their operand holds: as large as it is.
_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")
# Random results would not be the same on all ranks; the weight of a prelu lines up from the left.
_OTHERS = ("dropout", "feature_dropout", "rrelu", "prelu")


def pointwise(node: Node) -> Form | None:
    """add, mul, silu, where, casts, .."""
    result = sizes(node)
    tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
    return Form(tuple(tie for each in tensors for tie in along(each, pairs_from_right(each, result))))


RULES = {f"aten::{name}": pointwise for name in (*NAMES, *_LIKE) if name not in _OTHERS}
