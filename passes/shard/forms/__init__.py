"""Forms of operators, one family a file. What has none is computed whole on every rank.

| file | operators |
|---|---|
| `pointwise.py` | each element of the elements at its place |
| `views.py` | reshape, permute, expand and their kin |
| `slices.py` | slices, selected indices |
| `joins.py` | cat, stack |
| `contractions.py` | linear layers, matrix products, products by expert |
| `reductions.py` | sums, means, norms, softmax: whole in what they reduce |
| `indexing.py` | rows that are chosen by an index, embeddings |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.shard.form import Form
from kvcompile.passes.shard.forms import contractions, indexing, joins, pointwise, reductions, slices, views

Rule = Callable[[Node], Form | None]
FAMILIES = (pointwise, views, slices, joins, contractions, reductions, indexing)
RULES: dict[str, Rule] = {name: rule for family in FAMILIES for name, rule in family.RULES.items()}


def form_of(node: Node) -> Form | None:
    """The form of a call; None: it is computed whole."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    rule = RULES.get(node.target._schema.name)
    if rule is None and torch.Tag.pointwise in node.target.tags:
        rule = pointwise.pointwise
    return None if rule is None else rule(node)
