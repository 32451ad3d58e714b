"""Operators of a score's expression in C++, each in the dtype that its operands have; helpers: `include/expression.h`.

Nothing is refused but what could differ from PyTorch: a number beside a half that the half has not, an integer divided
by what may be 0, and operators that do not stand here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcompile.kernels.shared import ranges
from kvcompile.kernels.shared.ranges import INT32, Range

HALVES = {torch.float16: "f16", torch.bfloat16: "bf16"}
FLOATS = {torch.float32: "float", torch.float64: "double", **HALVES}
INTEGERS = {
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
ELEMENTS = {torch.bool: "bool", **INTEGERS, **FLOATS}  # of tensors
INT64 = ranges.of_dtype(torch.int64)
_COMPARED = {"eq": "==", "ge": ">=", "gt": ">"}
_BITWISE = {"and": "&", "or": "|", "xor": "^"}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
_MOST_SHIFT = 30  # of integers of less than 64 bits
# Functions of one float: what PyTorch computes, to the rounding of the functions themselves.
_FUNCTIONS = {
    **{
        name: f"std::{name}({{}})"
        for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "tanh", "sin", "cos")
    },
    **{name: f"std::{name}({{}})" for name in ("atan", "erf", "floor", "ceil", "trunc")},
    "round": "std::nearbyint({})",
    "rsqrt": "1 / std::sqrt({})",
    "sigmoid": "1 / (1 + std::exp(-{}))",
    "silu": "{0} / (1 + std::exp(-{0}))",
    "softplus": "({0} > 20 ? {0} : std::log1p(std::exp({0})))",
    "reciprocal": "1 / {}",
    "neg": "-{}",
    "abs": "std::fabs({})",
    "sign": "sign_of({})",
}
# x to the power of a number, as PyTorch has these.
_POWERS = {
    -2.0: "1 / ({0} * {0})",
    -1.0: "1 / {0}",
    -0.5: "1 / std::sqrt({0})",
    0.5: "std::sqrt({0})",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
}
_EXACT = ("min", "max", "neg", "abs", "sign")  # of halves: nothing to round


class Unprintable(Exception):
    """An expression that kernels do not compute; says what of it."""


@dataclass(frozen=True)
class Value:
    """What stands in a kernel for an instruction: `text` is a name, or a number where `number` is one.

    on: what of q, k, h and score it depends on; range: of integers
    """

    text: str
    dtype: torch.dtype
    on: frozenset[str] = frozenset()
    range: Range = (0, 0)
    number: float | int | bool | None = None

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def type(self) -> str:
        """Of the variable: halves are floats, integers have 64 bits where 32 may not hold them."""
        if self.dtype is torch.bool:
            return "bool"
        if self.is_float:
            return "double" if self.dtype is torch.float64 else "float"
        return "int32_t" if ranges.within(self.range, INT32) else "int64_t"

    def wide(self, wide: bool) -> str:
        """An integer as one of 64 bits, or as it is."""
        return f"int64_t{{{self.text}}}" if wide and self.type == "int32_t" else self.text


def number(value: float | int | bool, dtype: torch.dtype) -> Value:
    """A number of a dtype."""
    if dtype is torch.bool:
        return Value(str(bool(value)).lower(), dtype, range=(int(value), int(value)), number=bool(value))
    if dtype.is_floating_point:
        return Value(_float(float(value), dtype), dtype, number=float(value))
    own = int(value)
    text = f"INT64_C({own})" if not ranges.within((own, own), INT32) else str(own)
    if own == INT64[0]:
        text = "INT64_MIN"
    return Value(text if own >= 0 else f"({text})", dtype, range=(own, own), number=own)


def _float(value: float, dtype: torch.dtype) -> str:
    """The shortest text that is the number as a kernel holds it."""
    double = dtype is torch.float64
    if math.isnan(value):
        return "NAN"
    own = value if double else float(np.float32(value))
    if math.isinf(own):
        return "INFINITY" if own > 0 else "(-INFINITY)"
    text = repr(own) if double else f"{np.float32(value)!s}f"
    return f"({text})" if text.startswith("-") else text


def cast(a: Value, dtype: torch.dtype) -> tuple[str, Range]:
    """A value in another dtype, as PyTorch converts."""
    if dtype is torch.bool:
        return f"{a.text} != 0", (0, 1)
    if dtype.is_floating_point:
        text = f"static_cast<{'double' if dtype is torch.float64 else 'float'}>({a.text})"
        return (text if a.dtype is dtype else rounded(text, dtype)), (0, 0)
    limits = ranges.of_dtype(dtype)
    if a.is_float:
        if dtype in (torch.int32, torch.int64):
            return f"whole<{INTEGERS[dtype]}>({a.text})", limits
        return f"static_cast<{INTEGERS[dtype]}>(whole<int32_t>({a.text}))", limits
    if a.dtype is torch.bool:
        return f"int32_t{{{a.text}}}", (0, 1)
    return _wrapped(a.text, a.range, dtype)


def rounded(text: str, dtype: torch.dtype) -> str:
    """A float as the numbers that `dtype` has."""
    return f"to_float(rounded<{HALVES[dtype]}>({text}))" if dtype in HALVES else text


def claim(op: str, args: Sequence[Value]) -> str:
    """An operator that is true or false."""
    of_bools = all(arg.dtype is torch.bool for arg in args)
    if op == "not":
        return f"!{args[0].text}" if of_bools else f"{args[0].text} == 0"
    if op in _BITWISE and of_bools:
        return f" {_BITWISE[op]} ".join(arg.text for arg in args)
    if op in _COMPARED and len(args) == 2:
        return f"{_exact(args[0])} {_COMPARED[op]} {_exact(args[1])}"
    raise Unprintable(f"its scores or its mask have {op} of {args[0].dtype}, which kernels do not compute")


def floating(op: str, args: Sequence[Value], dtype: torch.dtype) -> str:
    """An operator of floats; the result is one that the dtype has."""
    texts = [_exact(arg) for arg in args]
    last = args[-1].number
    match op, len(args):
        case (("add" | "sub" | "mul"), 2):
            text = f"{texts[0]} {_ARITHMETIC[op]} {texts[1]}"
        case "div", 2 if args[0].number is not None:  # PyTorch's way to divide a number, with two roundings
            text = f"{rounded(f'1 / {texts[1]}', dtype)} * {texts[0]}"
            text = text if dtype in HALVES else f"(1 / {texts[1]}) * {texts[0]}"
        case "div", 2:
            text = f"{texts[0]} / {texts[1]}"
        case (("min" | "max"), 2):
            text = f"{'least' if op == 'min' else 'most_of'}({texts[0]}, {texts[1]})"
        case "pow", 2 if dtype not in HALVES:
            known = None if last is None else _POWERS.get(float(last))
            text = f"std::pow({texts[0]}, {texts[1]})" if known is None else known.format(texts[0])
        case "mod", 2 if dtype not in HALVES:
            text = f"remainder_of({texts[0]}, {texts[1]})"
        case "truncdiv", 2 if dtype not in HALVES:
            text = f"std::trunc({texts[0]} / {texts[1]})"
        case _, 1 if op in _FUNCTIONS:
            text = _FUNCTIONS[op].format(texts[0])
        case _:
            raise Unprintable(f"its scores or its mask have {op} of {dtype}, which kernels do not compute")
    return text if op in _EXACT else rounded(text, dtype)


def integer(op: str, args: Sequence[Value], dtype: torch.dtype) -> tuple[str, Range]:
    """An operator of integers, and what it may give."""
    a, b = args[0], args[-1]
    span = ranges.of(op, [arg.range for arg in args]) if len(args) < 3 else None
    shift = op in ("shl", "shr")
    if span is None or any(arg.dtype is not dtype for arg in args):
        raise Unprintable(
            f"its scores or its mask have {op} of {', '.join(str(arg.dtype) for arg in args)}, and of such numbers "
            "kernels do not compute it"
        )
    if shift and dtype is not torch.int64 and b.range[1] > _MOST_SHIFT:
        raise Unprintable(f"its scores or its mask have {op} of {dtype} by {b.range[1]}")
    wide = not all(ranges.within(one, INT32) for one in (span, a.range, b.range))
    wide = wide or (shift and b.range[1] > _MOST_SHIFT)
    beyond = not ranges.within(span, INT64)
    left, right = a.wide(wide), b.wide(wide)
    type_ = "int64_t" if wide else "int32_t"
    match op:
        case "add" | "sub" | "mul" if beyond:
            text = f"wrapped_{op}({left}, {right})"
        case "add" | "sub" | "mul":
            text = f"{left} {_ARITHMETIC[op]} {right}"
        case "and" | "or" | "xor":
            text = f"{left} {_BITWISE[op]} {right}"
        case "shl":
            text = f"{'wrapped_mul' if beyond else ''}({left}{', ' if beyond else ' * '}{_power(b.range[0], wide)})"
        case "shr":
            text = f"{left} >> {b.range[0]}"
        case "min" | "max":
            text = f"std::{op}<{type_}>({left}, {right})"
        case "neg":
            text = f"wrapped_sub(0, {left})" if beyond else f"-{left}"
        case "abs":
            text = f"({left} < 0 ? {f'wrapped_sub(0, {left})' if beyond else f'-{left}'} : {left})"
        case "bitnot":
            text = f"~{left}"
        case "sign":
            text = f"({left} > 0) - ({left} < 0)"
        case "floordiv" | "truncdiv" if a.range[0] >= 0 or op == "truncdiv":
            text = f"{left} / {right}"
        case "mod" if a.range[0] >= 0:
            text = f"{left} % {right}"
        case _:
            text = f"{'floor_divided' if op == 'floordiv' else 'floor_remainder'}<{type_}>({left}, {right})"
    return _wrapped(text, span, dtype)


def chosen(args: Sequence[Value], dtype: torch.dtype) -> tuple[str, Range]:
    """One of two values."""
    claim_, yes, no = args
    texts = []
    for one in (yes, no):
        if one.number is not None and dtype.is_floating_point:
            one = number(_held(float(one.number), dtype), dtype)
        texts.append(one.text)
    return f"{claim_.text} ? {texts[0]} : {texts[1]}", ranges.joined(yes.range, no.range)


def _wrapped(text: str, span: Range, dtype: torch.dtype) -> tuple[str, Range]:
    """An integer that was computed in 32 or 64 bits, as its dtype has it."""
    limits = ranges.of_dtype(dtype)
    if ranges.within(span, limits):
        return text, span
    return (text if dtype is torch.int64 else f"static_cast<{INTEGERS[dtype]}>({text})"), limits


def _power(of: int, wide: bool) -> str:
    return f"INT64_C({1 << of})" if wide else str(1 << of)


def _held(value: float, dtype: torch.dtype) -> float:
    """A number rounded to a dtype."""
    return float(torch.tensor(value, dtype=dtype))


def _exact(a: Value) -> str:
    """A number beside a half: only one that the half has, since not every operator of PyTorch rounds it."""
    if a.number is None or a.dtype not in HALVES or math.isnan(a.number):
        return a.text
    if _held(float(a.number), a.dtype) != a.number:
        raise Unprintable(
            f"its scores or its mask have the number {a.number} beside {a.dtype}, which has no such number"
        )
    return a.text
