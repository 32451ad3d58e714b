"""Arithmetic that PyTorch's exporter, or ONNX Runtime, does otherwise than PyTorch, in operators that are the same.

| operator | otherwise (PyTorch 2.13, ONNX Runtime 1.31) | here |
|---|---|---|
| div with a rounding mode, of integers | a quotient of float32: wrong beyond 2^24 | Div, which truncates, and Mod |
| fmod of integers | a remainder of float64: wrong beyond 2^53 | the same |
| minimum, maximum, clamp, sign of int64 | numbers beyond 32 bits are compared by some of their bits | comparisons |
| clamp with one bound, of floats | Clip, without which bound an infinity is the largest number | Min, Max |
| remainder, floor_divide of floats | x - floor(x / y) y, rounded three times | Mod as C has it, which is exact |
| shifts | nothing beyond 63, nothing of int16, int8 for uint8; no BitShift in TensorRT | powers of two |
| log2 | log(x) / log(2): 14.99.. of 2^15 | the same, but whole for powers of two |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import onnxscript
import torch

aten = torch.ops.aten
_NO_KERNELS = (ir.DataType.INT16,)  # of comparisons; ONNX Runtime casts it
_COMPARED = (ir.DataType.INT64, *_NO_KERNELS)
_BITS = 63


def translations(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Translations by operator, for `torch.onnx.export(custom_translation_table=...)`."""
    op: Any = onnxscript.values.Opset("", opset)

    def is_float(x: Any) -> bool:
        return bool(x.dtype.is_floating_point())

    def both(x: Any, y: Any) -> tuple[Any, Any]:
        """Two operands of one dtype as tensors, where one may be a number."""
        if isinstance(x, (int, float)):
            x = op.CastLike(op.Constant(value_float=float(x)) if is_float(y) else integer(x), y)
            x.dtype = y.dtype
        if isinstance(y, (int, float)):
            y = op.CastLike(op.Constant(value_float=float(y)) if is_float(x) else integer(y), x)
            y.dtype = x.dtype
        return x, y

    def integer(value: float) -> Any:
        return op.Constant(value_int=int(value))

    def apart(x: Any, y: Any) -> Any:
        """Whether one is negative and the other is not."""
        return op.Xor(op.Less(x, zero(x)), op.Less(y, zero(y)))

    def zero(x: Any) -> Any:
        return op.CastLike(integer(0), x)

    def is_zero(x: Any) -> Any:
        return op.Equal(x, zero(x))

    # Quotients and remainders.

    def floor_divide(x: Any, y: Any) -> Any:
        x, y = both(x, y)
        if is_float(x):
            return floor_divided(x, y)
        inexact = op.And(op.Not(is_zero(op.Mod(x, y))), apart(x, y))
        return op.Sub(op.Div(x, y), op.CastLike(inexact, x))

    def floor_divided(x: Any, y: Any) -> Any:
        """As PyTorch has it: the quotient without the remainder, which is whole but for its rounding."""
        left = op.Mod(x, y, fmod=1)
        down = op.CastLike(op.And(op.Not(is_zero(left)), apart(left, y)), x)
        quotient = op.Sub(op.Div(op.Sub(x, left), y), down)
        floor = op.Floor(quotient)
        up = op.CastLike(op.Greater(op.Sub(quotient, floor), op.CastLike(op.Constant(value_float=0.5), x)), x)
        return op.Where(is_zero(y), op.Div(x, y), op.Add(floor, up))

    def remainder(x: Any, y: Any) -> Any:
        x, y = both(x, y)
        if not is_float(x):
            return op.Mod(x, y)
        left = op.Mod(x, y, fmod=1)
        return op.Where(op.And(op.Not(is_zero(left)), apart(left, y)), op.Add(left, y), left)

    def fmod(x: Any, y: Any) -> Any:
        x, y = both(x, y)
        return op.Mod(x, y, fmod=1) if is_float(x) else op.Sub(x, op.Mul(op.Div(x, y), y))

    def div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
        x, y = both(x, y)
        match rounding_mode:
            case "floor":
                return floor_divide(x, y)
            case "trunc" if is_float(x):
                quotient = op.Div(x, y)
                return op.Mul(op.Sign(quotient), op.Floor(op.Abs(quotient)))
            case _:
                return op.Div(x, y)

    # Extremes.

    def extreme(x: Any, y: Any, least: bool) -> Any:
        x, y = both(x, y)
        if x.dtype not in _COMPARED:
            return op.Min(x, y) if least else op.Max(x, y)
        dtype = x.dtype
        if dtype in _NO_KERNELS:
            x, y = (op.Cast(t, to=ir.DataType.INT64) for t in (x, y))
        found = op.Where(op.Less(x, y) if least else op.Less(y, x), x, y)
        return op.Cast(found, to=dtype) if dtype in _NO_KERNELS else found

    def minimum(x: Any, y: Any) -> Any:
        return extreme(x, y, least=True)

    def maximum(x: Any, y: Any) -> Any:
        return extreme(x, y, least=False)

    def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
        dtype = x.dtype
        if min is not None:
            x = maximum(x, min)
            x.dtype = dtype
        return x if max is None else minimum(x, max)

    def sign(x: Any) -> Any:
        return op.Sub(op.CastLike(op.Greater(x, zero(x)), x), op.CastLike(op.Less(x, zero(x)), x))

    # Shifts, in int64: a number beyond the bits of the dtype leaves nothing, or the sign.

    def wide(x: Any) -> Any:
        return integer(x) if isinstance(x, int) else op.Cast(x, to=ir.DataType.INT64)

    def power(by: Any, most: int) -> tuple[Any, Any]:
        """2 to the power of `by`, and whether that is from 0 to `most`."""
        powers = op.Constant(value_ints=[2**bit for bit in range(_BITS)] + [-(2**_BITS)])
        within = op.And(op.GreaterOrEqual(by, integer(0)), op.LessOrEqual(by, integer(most)))
        return op.Gather(powers, op.Where(within, by, integer(0))), within

    def of(found: Any, *given: Any) -> Any:
        return op.CastLike(found, next(x for x in given if not isinstance(x, int)))

    def shift_left(x: Any, by: Any) -> Any:
        factor, within = power(wide(by), _BITS)
        return of(op.Where(within, op.Mul(wide(x), factor), integer(0)), x, by)

    def shift_right(x: Any, by: Any) -> Any:
        divisor, within = power(wide(by), _BITS - 1)
        number = wide(x)
        whole = op.Div(op.Sub(number, op.Mod(number, divisor)), divisor)
        rest = op.Where(op.Less(number, integer(0)), integer(-1), integer(0))
        return of(op.Where(within, whole, rest), x, by)

    def log2(x: Any) -> Any:
        found = op.Div(op.Log(x), op.Log(op.CastLike(integer(2), x)))
        whole = op.Round(found)
        exact = op.Equal(op.Pow(op.CastLike(integer(2), x), whole), x)
        return op.Where(exact, whole, found)

    made: dict[Callable[..., Any], Callable[..., Any]] = {
        aten.floor_divide.default: floor_divide,
        aten.remainder.Tensor: remainder,
        aten.remainder.Scalar: remainder,
        aten.remainder.Scalar_Tensor: remainder,
        aten.fmod.Tensor: fmod,
        aten.fmod.Scalar: fmod,
        aten.div.Tensor_mode: div,
        aten.div.Scalar_mode: div,
        aten.minimum.default: minimum,
        aten.maximum.default: maximum,
        aten.clamp.default: clamp,
        aten.clamp.Tensor: clamp,
        aten.clamp_min.default: maximum,
        aten.clamp_min.Tensor: maximum,
        aten.clamp_max.default: minimum,
        aten.clamp_max.Tensor: minimum,
        aten.sign.default: sign,
        aten.log2.default: log2,
    }
    made |= dict.fromkeys((aten.__lshift__.Tensor, aten.__lshift__.Scalar), shift_left)
    made |= dict.fromkeys((aten.__rshift__.Tensor, aten.__rshift__.Scalar), shift_right)
    for name, function in (("left", shift_left), ("right", shift_right)):
        packet = getattr(aten, f"bitwise_{name}_shift")
        for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor"):
            made[getattr(packet, overload)] = function
    return made
