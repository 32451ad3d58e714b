"""Expressions: what a model does to one score, as a function of where its query and its key stand.

An expression is a tree (with shared parts) over

    q, k      positions of the query and of the key in their sequence, int64
    h         the query head, int64
    b, n, nb, r  the sequence in the batch, how many tokens it has, how many sequences there are, a channel of a
              vector: proofs know them, what is carried has none of them
    score     the scaled product of the query with the key
    leaf      an element of a tensor: of a weight at the places that its arguments say, or of what a model computes for
              the query's token, for the key's token, or for the pair of them

Equal expressions are one object, so comparing two of them is comparing identities. An operator computes in the dtype
that its operands have; casts are spelled out, so that evaluating (`kernels/shared/expression.py`) rounds where the
model does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from weakref import WeakValueDictionary

import torch

LeafKind = Literal["table", "query", "key", "pair"]

# Elements of a table that are compared with closed forms; positions that a table may have.
LONGEST_TABLE = 2**26
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Over all keys: the variable k of their operand is bound in them.
REDUCTIONS = ("reduce_max", "reduce_min", "reduce_sum", "reduce_lse", "reduce_any", "reduce_all")


class Expr:
    """One node: an operator, the dtype of its value, its operands, and what it has besides them (hashable)."""

    __slots__ = ("__weakref__", "args", "dtype", "names", "op", "value")
    _all: ClassVar[WeakValueDictionary[Any, Expr]] = WeakValueDictionary()

    op: str
    dtype: torch.dtype
    args: tuple[Expr, ...]
    value: Any
    names: frozenset[str]  # variables, and kinds of leaves, on which the value depends

    def __new__(cls, op: str, dtype: torch.dtype, args: tuple[Expr, ...] = (), value: Any = None) -> Expr:
        # Floats are told apart by their text: nan is not itself, and -0.0 equals 0.0.
        key = (op, dtype, args, repr(value) if isinstance(value, float) else value, type(value))
        found = cls._all.get(key)
        if found is None:
            found = super().__new__(cls)
            found.op, found.dtype, found.args, found.value = op, dtype, args, value
            found.names = _names(op, args, value)
            cls._all[key] = found
        return found

    def __repr__(self) -> str:
        return text(self)

    def __deepcopy__(self, memo: Any) -> Expr:
        return self

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_bool(self) -> bool:
        return self.dtype is torch.bool

    @property
    def is_int(self) -> bool:
        return self.dtype in INTEGERS


def _names(op: str, args: tuple[Expr, ...], value: Any) -> frozenset[str]:
    found = frozenset[str]().union(*(arg.names for arg in args))
    if op in REDUCTIONS:
        return (found - {"k", "score", "key", "pair"}) | {"q", "reduction"}
    if op == "leaf":
        kind = value.kind if not isinstance(value, int) else "leaf"
        own = {"query": {"q"}, "key": {"k"}, "pair": {"q", "k"}}.get(kind, set())
        return found | own | {"leaf", kind}
    if op in ("softmax", "log_softmax"):
        return found | {"reduction"}
    return found if args or op == "const" else found | {op}


def variable(name: str, dtype: torch.dtype = torch.int64) -> Expr:
    return Expr(name, dtype)


Q, K, H, B, N, NB, R = (variable(name) for name in ("q", "k", "h", "b", "n", "nb", "r"))
SCORE = variable("score", torch.float32)
TRUE, FALSE = Expr("const", torch.bool, (), True), Expr("const", torch.bool, (), False)


def const(value: float | int | bool, dtype: torch.dtype) -> Expr:
    """A number of a dtype; a bool, an int or a float as the dtype has it."""
    if dtype is torch.bool:
        return TRUE if value else FALSE
    return Expr("const", dtype, (), float(value) if dtype.is_floating_point else int(value))


def integer(value: int) -> Expr:
    return const(value, torch.int64)


_ZERO = integer(0)


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every node of the expressions once, operands before what they are operands of."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in seen:
            continue
        if ready:
            seen.add(node)
            yield node
            continue
        stack.append((node, True))
        stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)


def rebuilt(root: Expr, change: Callable[[Expr, tuple[Expr, ...]], Expr]) -> Expr:
    """The expression made anew from its leaves up: change(node, new operands) gives what a node becomes."""
    made: dict[Expr, Expr] = {}
    for node in walk(root):
        made[node] = change(node, tuple(made[arg] for arg in node.args))
    return made[root]


@dataclass(frozen=True)
class Instruction:
    """One node of a program: its operands by their number, its dtype by name."""

    op: str
    dtype: str
    args: tuple[int, ...] = ()
    value: float | int | bool | str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


@dataclass(frozen=True)
class ScoreMod:
    """What a site does to its scores besides scale, softcap, a closed form of mask and bias, and sinks.

    instructions: all nodes, operands first; a `leaf` has the number of its tensor as value
    score:        the number of what a score becomes (None: what it is)
    mask:         of whether the query sees the key (None: as `MaskSpec` says)
    weight:       of the factor of a probability after the softmax (None: one)
    renormalise:  with weights, the probabilities are divided by their sum plus this (None: they are not)
    leaves:       of which kind each tensor is: a weight of any shape ("table"), of the new tokens [B, S, ..] ("query"),
                  of all tokens [B, T, ..] ("key"), of both [B or 1, S, T, ..] ("pair")
    by_distance:  positions enter as q - k alone
    empty_rows:   whether a query may see no key at all: its result is 0, as PyTorch's SDPA has it
    """

    instructions: tuple[Instruction, ...]
    leaves: tuple[LeafKind, ...] = ()
    score: int | None = None
    mask: int | None = None
    weight: int | None = None
    renormalise: float | None = None
    by_distance: bool = False
    empty_rows: bool = False

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ScoreMod:
        made = [
            Instruction(i["op"], i["dtype"], tuple(i["args"]), _number(i["value"]))
            for i in data["instructions"]
        ]
        return ScoreMod(**{**data, "instructions": tuple(made), "leaves": tuple(data["leaves"])})

    def to_dict(self) -> dict[str, Any]:
        """Plain data; numbers that JSON has no word for are texts."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        made = [
            {"op": i.op, "dtype": i.dtype, "args": list(i.args), "value": _spelled(i.value)}
            for i in self.instructions
        ]
        return {**fields, "instructions": made, "leaves": list(self.leaves)}

    @property
    def reads_tokens(self) -> bool:
        """Whether it needs what the model computed for the key's token."""
        return "key" in self.leaves or "pair" in self.leaves

    def __str__(self) -> str:
        parts = []
        exprs = self.expressions()
        for name, number in (("score", self.score), ("mask", self.mask), ("weight", self.weight)):
            if number is not None:
                parts.append(f"{name} {text(exprs[number])}")
        if self.renormalise is not None:
            parts.append("weights renormalised")
        if self.empty_rows:
            parts.append("queries that see nothing give 0")
        return "carried: " + "; ".join(parts)

    def expressions(self) -> list[Expr]:
        """The expression of every instruction."""
        made: list[Expr] = []
        for i in self.instructions:
            made.append(Expr(i.op, i.torch_dtype, tuple(made[arg] for arg in i.args), i.value))
        return made


def program(
    roots: dict[str, Expr | None], number: Callable[[Any], int]
) -> tuple[tuple[Instruction, ...], dict[str, int | None]]:
    """Instructions for several expressions, and which of them each is; number: that of a leaf's tensor."""
    numbers: dict[Expr, int] = {}
    made: list[Instruction] = []
    roots = {name: root if root is None else expanded(root) for name, root in roots.items()}
    for node in walk(*(root for root in roots.values() if root is not None)):
        value = number(node.value) if node.op == "leaf" else node.value
        args = tuple(numbers[arg] for arg in node.args)
        numbers[node] = len(made)
        made.append(Instruction(node.op, str(node.dtype).removeprefix("torch."), args, value))
    return tuple(made), {name: None if root is None else numbers[root] for name, root in roots.items()}


def _number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _spelled(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _sum(value: tuple[int, ...], args: list[str]) -> str:
    parts = [arg if factor == 1 else f"{factor} * {arg}" for factor, arg in zip(value[1:], args, strict=True)]
    return f"({' + '.join([*parts, str(value[0])] if value[0] else parts)})"


def expanded(root: Expr) -> Expr:
    """The expression with sums of integers as additions and multiplications."""

    made: dict[Expr, Expr] = {}
    for node in walk(root):
        args = tuple(made[arg] for arg in node.args)
        if node.op == "sum":
            terms = list(zip(args, node.value[1:], strict=True))
            made[node] = _added(terms, node.value[0], node.dtype)
        elif node.op in ("eq", "ge") and node.args[0].op == "sum" and node.args[1] is _ZERO:
            # What has a negative factor stands on the other side, so that nothing large is subtracted.
            inner = node.args[0]
            terms = list(zip((made[arg] for arg in inner.args), inner.value[1:], strict=True))
            left = [(term, factor) for term, factor in terms if factor > 0]
            right = [(term, -factor) for term, factor in terms if factor < 0]
            sides = (_added(left, 0, inner.dtype), _added(right, -inner.value[0], inner.dtype))
            made[node] = Expr(node.op, node.dtype, sides)
        else:
            made[node] = Expr(node.op, node.dtype, args, node.value)
    return made[root]


def _added(terms: list[tuple[Expr, int]], offset: int, dtype: torch.dtype) -> Expr:
    """A constant and terms times their factors as additions, subtractions and products."""
    found: Expr | None = None
    for term, factor in terms:
        if factor == -1 and found is not None:
            found = Expr("sub", dtype, (found, term))
            continue
        part = term if factor == 1 else Expr("mul", dtype, (term, const(factor, dtype)))
        found = part if found is None else Expr("add", dtype, (found, part))
    if found is None:
        return const(offset, dtype)
    return found if not offset else Expr("add", dtype, (found, const(offset, dtype)))


_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "mod": "%",
    "eq": "==",
    "ge": ">=",
    "gt": ">",
    "and": "&",
    "or": "|",
    "xor": "^",
}
_MOST = 240  # characters of an expression that people read


def text(root: Expr) -> str:
    """An expression as people read it, cut where it is long."""
    made: dict[Expr, str] = {}
    for node in walk(root):
        args = [made[arg] for arg in node.args]
        if node.op == "const":
            made[node] = str(node.value) if not node.is_float else f"{node.value:g}"
        elif node.op in _INFIX and len(args) == 2:
            made[node] = f"({args[0]} {_INFIX[node.op]} {args[1]})"
        elif node.op == "sum":
            made[node] = _sum(node.value, args)
        elif node.op == "not":
            made[node] = f"~{args[0]}"
        elif node.op == "cast":
            made[node] = f"{str(node.dtype).removeprefix('torch.')}({args[0]})"
        elif node.op == "leaf":
            made[node] = f"{node.value}[{', '.join(args)}]"
        else:
            made[node] = node.op if not args else f"{node.op}({', '.join(args)})"
        if len(made[node]) > _MOST:
            made[node] = made[node][: _MOST - 1] + "…"
    return made[root]
