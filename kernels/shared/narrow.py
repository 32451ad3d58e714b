"""Operators in narrow dtypes, for a portable graph (`dialect.py`): halves in float32, small integers in int64.

PyTorch rounds after every operator. Runtimes need not: ONNX Runtime computes several operators of halves in float32 on
a CPU and rounds what comes out, and of small integers it lacks operators. So a value is held in the wide dtype, and is
one that the narrow dtype has, by a cast there and back after every operator, which runtimes leave where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.shared.dialect import current

Value = Any  # a tensor, or a number
Apply = Callable[[str, Sequence[Value], torch.dtype, torch.device], Value]

WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int64,
    torch.uint8: torch.int64,
    torch.int16: torch.int64,
}
# Operators that take a number beside a half as it is, on its left and on its right; all others round it first.
_UNROUNDED = {"mul": (True, True), "div": (False, True), "floordiv": (False, True)}


def held(value: Value, dtype: torch.dtype) -> Value:
    """A tensor with the values of `dtype`, as it is held."""
    wide = WIDE.get(dtype) if current().portable else None
    return value if wide is None or not isinstance(value, Tensor) else value.to(wide)


def applied(
    apply: Apply,
    op: str,
    args: Sequence[Value],
    of: Sequence[torch.dtype],
    dtype: torch.dtype,
    device: torch.device,
) -> Value:
    """`apply(op, args, dtype, device)`, of operands that are held; of: the dtypes that they stand for."""
    if not current().portable:
        return apply(op, args, dtype, device)
    if dtype is torch.bool and op == "add":  # which is of numbers alone in ONNX
        op = "or"
    if not any(own in WIDE for own in (dtype, *of)):
        return apply(op, args, dtype, device)
    if op == "div" and not isinstance(args[0], Tensor):
        # PyTorch's own way to divide a number, with two roundings.
        once = applied(apply, "reciprocal", [args[1]], [of[1]], dtype, device)
        return applied(apply, "mul", [once, args[0]], [of[1], of[0]], dtype, device)
    args = [_number(op, place, arg, own) for place, (arg, own) in enumerate(zip(args, of, strict=True))]
    found = apply(op, args, WIDE.get(dtype, dtype), device)
    return held(found.to(dtype), dtype) if dtype in WIDE and isinstance(found, Tensor) else found


def _number(op: str, place: int, arg: Value, dtype: torch.dtype) -> Value:
    """An operand; a number beside a half with the rounding that PyTorch gives it."""
    if isinstance(arg, Tensor) or not (dtype in WIDE and dtype.is_floating_point):
        return arg
    if place < 2 and _UNROUNDED.get(op, (False, False))[place]:
        return arg
    return float(torch.tensor(arg, dtype=dtype))
