"""Evaluates what a model does to its scores (`kvcompile/expression.py`) in plain PyTorch, as the model itself would.

Shapes: queries and keys broadcast as [B, Hkv, G, S, T], G query heads a KV head. So what Inductor and the exporters see
is ordinary pointwise arithmetic beside the scores, and gathers from the tensors of the leaves.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.expression import Instruction, ScoreMod
from kvcompile.kernels.shared import narrow

Value = Any  # a tensor, or a number where an instruction is one


def _extreme(least: bool) -> Callable[[Value, Value], Value]:
    def apply(a: Value, b: Value) -> Value:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return torch.minimum(a, b) if least else torch.maximum(a, b)
        if not isinstance(a, Tensor):
            a, b = b, a
        return a.clamp(max=b) if least else a.clamp(min=b)

    return apply


def _trunc_divide(a: Value, b: Value) -> Value:
    return torch.div(a, b, rounding_mode="trunc")


def _power(a: Value, b: Value) -> Value:
    return torch.pow(a, b)


# Operators by name: what translation makes of a model's own (`passes/score_mod/rules/`).
OPERATORS: dict[str, Callable[..., Value]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "truncdiv": _trunc_divide,
    "mod": operator.mod,
    "pow": _power,
    "min": _extreme(least=True),
    "max": _extreme(least=False),
    "eq": operator.eq,
    "ge": operator.ge,
    "gt": operator.gt,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": torch.bitwise_left_shift,  # PyTorch's operators << and >> have no shapes where sizes are symbols
    "shr": torch.bitwise_right_shift,
    "not": torch.logical_not,
    "bitnot": torch.bitwise_not,
    "where": torch.where,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "sign": torch.sign,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "reciprocal": torch.reciprocal,
}


@dataclass(frozen=True)
class Places:
    """Where queries and keys stand, and what else an expression reads.

    query:  int64 [B, S], not negative
    key:    int64 [B, T] or [B, Hkv or 1, T], not negative
    heads:  KV heads, and query heads a KV head; first: the number of the first of them
    leaves: the tensors, as `ScoreMod.leaves` says; those of keys and pairs are by position: [B, span, ..] and
            [B or 1, S, span, ..]
    """

    query: Tensor
    key: Tensor
    heads: tuple[int, int]
    leaves: Sequence[Tensor] = ()
    first: int = 0

    @property
    def q(self) -> Tensor:
        return self.query[:, None, None, :, None]

    @property
    def k(self) -> Tensor:
        key = self.key if self.key.dim() == 3 else self.key[:, None]
        return key[:, :, None, None, :]

    @property
    def h(self) -> Tensor:
        count = self.heads[0] * self.heads[1]
        found = torch.arange(count, device=self.query.device).view(1, *self.heads, 1, 1)
        return found + self.first if self.first else found


def evaluate(
    mod: ScoreMod, wanted: Sequence[int], places: Places, score: Tensor | None = None
) -> list[Value]:
    """The values of instructions `wanted` of a mod, each [B or 1, Hkv or 1, G or 1, S or 1, T or 1].

    score: fp32 [B, Hkv, G, S, T], scaled and capped; needed where the program mentions it
    """
    needed: set[int] = set()
    stack = list(wanted)
    while stack:
        number = stack.pop()
        if number not in needed:
            needed.add(number)
            stack.extend(mod.instructions[number].args)
    values: dict[int, Value] = {}
    for number in sorted(needed):
        instruction = mod.instructions[number]
        args = [values[arg] for arg in instruction.args]
        values[number] = _value(instruction, args, mod, places, score)
    return [values[number] for number in wanted]


def _value(
    instruction: Instruction, args: list[Value], mod: ScoreMod, places: Places, score: Tensor | None
) -> Value:
    match instruction.op:
        case "const":
            return instruction.value
        case "q":
            return places.q
        case "k":
            return places.k
        case "h":
            return places.h
        case "score":
            assert score is not None
            return score
        case "leaf":
            assert isinstance(instruction.value, int)
            number = instruction.value
            return narrow.held(
                _element(mod.leaves[number], places.leaves[number], args, places), instruction.torch_dtype
            )
        case "cast":
            return narrow.held(cast(args[0], instruction.torch_dtype), instruction.torch_dtype)
        case _:
            of = [mod.instructions[arg].torch_dtype for arg in instruction.args]
            return narrow.applied(
                apply, instruction.op, args, of, instruction.torch_dtype, places.query.device
            )


def cast(value: Value, dtype: torch.dtype) -> Value:
    if isinstance(value, Tensor):
        return value.to(dtype)
    return bool(value) if dtype is torch.bool else float(value) if dtype.is_floating_point else int(value)


def apply(op: str, args: Sequence[Value], dtype: torch.dtype, device: torch.device) -> Value:
    """One operator on tensors and numbers; the result has `dtype`."""
    if op == "where" and not all(isinstance(arg, Tensor) for arg in args[1:]):
        # A number alone would have PyTorch's default dtype.
        args = [
            args[0],
            *(
                arg if isinstance(arg, Tensor) else torch.full((), arg, dtype=dtype, device=device)
                for arg in args[1:]
            ),
        ]
    elif not any(isinstance(arg, Tensor) for arg in args) or op in ("floordiv", "truncdiv", "pow"):
        args = [_tensor(arg, device) if i == 0 else arg for i, arg in enumerate(args)]
    if len(args) > 2 and op in ("and", "or"):
        return functools.reduce(OPERATORS[op], args)
    return OPERATORS[op](*args)


def _tensor(value: Value, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.int64 if isinstance(value, int) else None, device=device)


def _element(kind: str, tensor: Tensor, index: list[Value], places: Places) -> Tensor:
    """Elements of a leaf's tensor; places outside of it are those of keys that no query sees."""
    device = tensor.device
    batch = torch.arange(places.query.shape[0], device=device)[:, None, None, None, None]
    row = torch.arange(places.query.shape[1], device=device)[None, None, None, :, None]
    first: list[Tensor] = []
    if kind == "query":
        first = [batch, row]
    elif kind == "key":
        first = [batch, places.k.clamp(max=tensor.shape[1] - 1)]
    elif kind == "pair":
        own = batch if tensor.shape[0] != 1 else torch.zeros_like(batch)
        first = [own, row, places.k.clamp(max=tensor.shape[2] - 1)]
    rest: list[Tensor] = []
    for place in index:
        dim = len(first) + len(rest)
        size = tensor.shape[dim]
        if not isinstance(place, Tensor):
            tensor = tensor.select(dim, place)
            continue
        place = torch.where(place < 0, place + size, place)  # as indexing counts from the end
        rest.append(place.clamp(0, size - 1))
    every = (*first, *rest)
    return tensor[every] if every else tensor
