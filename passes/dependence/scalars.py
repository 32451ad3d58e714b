"""Numbers: sizes and what is computed from them. What a number is, its own expression says."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch.fx import Node

from kvcompile.passes.dependence.context import Context
from kvcompile.passes.dependence.facts import Counts, Fact, Level, N
from kvcompile.passes.graph import expr, target_name


def number(ctx: Context, node: Node) -> Fact:
    """CONSTANT without symbols; LENGTH with that of the tokens alone; else ANYTHING. Whoever uses it says why."""
    value = node.meta.get("val")
    source = node.args[0] if node.args and target_name(node) in ("item", "_local_scalar_dense") else None
    if isinstance(source, Node):
        found = ctx.fact(source)
        return replace(found, dims=(), knows=found.knows if isinstance(found.knows, Counts) else None)
    if isinstance(value, (int, float, bool)):
        return Fact((), Level.CONSTANT)
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return Fact((), Level.ANYTHING)
    expression = sympy.sympify(expr(value)).xreplace(ctx.same) if hasattr(value, "node") else None
    if expression is None:
        return Fact((), Level.ANYTHING)
    symbols = expression.free_symbols
    if not symbols:
        return Fact((), Level.CONSTANT)
    if symbols == {ctx.seq}:
        return Fact((), Level.LENGTH, length=expression.xreplace({ctx.seq: N}))
    return Fact((), Level.ANYTHING)
