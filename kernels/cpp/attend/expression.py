"""What a site does to its scores as an expression (`ScoreMod`), printed as C++: the third reader of what
`kernels/shared/expression.py` evaluates, with the same result, rounding included.

| values | in a kernel |
|---|---|
| truth values | bool |
| integers | 32 bits where `kernels/shared/ranges.py` shows that they fit, else 64; narrower dtypes wrap around |
| float32, float64 | float, double: no product is joined with a sum (`host/compiler.py: FLAGS`) |
| float16, bfloat16 | float that is rounded after every operator |

Elements of leaves are read where indexing says, counted from the end where that is negative; what points beyond a leaf
is a key that no query sees, and reads some element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kvcompile.expression import Instruction, ScoreMod
from kvcompile.kernels.cpp.attend import operators
from kvcompile.kernels.cpp.attend.operators import ELEMENTS, Unprintable, Value
from kvcompile.kernels.shared import ranges
from kvcompile.kernels.shared.ranges import Range

# What stands before a leaf's own places, by its kind; and what of q and k that depends on.
_FIRST = {"table": "", "query": "batch, row", "key": "batch, {key}", "pair": "batch, row, {key}"}
_ON = {"table": "", "query": "q", "key": "k", "pair": "qk"}
_MOST_DIMS = 6  # of a tensor: MOST_DIMS of `include/call.h`
_KEY = "std::max<int64_t>(key, 0)"


def wanted(mod: ScoreMod) -> list[int]:
    """The numbers of the instructions that the score and the mask need, operands first."""
    needed: set[int] = set()
    stack = [number for number in (mod.score, mod.mask) if number is not None]
    while stack:
        number = stack.pop()
        if number not in needed:
            needed.add(number)
            stack.extend(mod.instructions[number].args)
    return sorted(needed)


def read(mod: ScoreMod) -> dict[int, torch.dtype]:
    """The dtypes of the leaf tensors that are read, by number.

    Raises:
        Unprintable: one is read in two ways, or has more dimensions than a kernel is told of.
    """
    found: dict[int, torch.dtype] = {}
    rank: dict[int, int] = {}
    for own in (mod.instructions[number] for number in wanted(mod)):
        if own.op != "leaf":
            continue
        assert isinstance(own.value, int)
        of = len(own.args) + {"table": 0, "query": 2, "key": 2, "pair": 3}[mod.leaves[own.value]]
        if (
            found.setdefault(own.value, own.torch_dtype) != own.torch_dtype
            or rank.setdefault(own.value, of) != of
        ):
            raise Unprintable("one of the tensors that its scores or its mask read is read in two ways")
        if of > _MOST_DIMS:
            raise Unprintable(
                f"its scores or its mask read a tensor of {of} dimensions, and kernels know {_MOST_DIMS}"
            )
    return found


def leaves_of(mod: ScoreMod | None) -> list[str]:
    """The names of a mod's tensors, as a kernel has them."""
    return [] if mod is None else [f"LEAF{number}" for number in range(len(mod.leaves))]


def refusal(mod: ScoreMod) -> str | None:
    """Why kernels do not compute it, or None."""
    if mod.weight is not None:
        return "what the softmax gives is weighed once more, which kernels do not do"
    if mod.renormalise is not None:
        return "what the softmax gives is divided by its sum once more, which kernels do not do"
    try:
        printed(mod)
    except Unprintable as reason:
        return str(reason)
    return None


@dataclass(frozen=True)
class Lines:
    """The text of a mod: what is computed once for a query, for each key, for each head, and for each score.

    query:  lines over `batch`, `row` (of the new tokens) and `query` (its position)
    keys:   of each key, over `key` (its position) too; they are the same for all heads
    heads:  of each head, over `head`, that no key changes
    scores: of each key and head, over `score`, too
    kept:   of the values of keys those that scores need, with their types
    result: what the score becomes; told: the mod as people read it
    """

    query: tuple[str, ...]
    keys: tuple[str, ...]
    heads: tuple[str, ...]
    scores: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    result: str
    told: str


def printed(mod: ScoreMod, query_by_key: bool = False) -> Lines:
    """The lines of a mod. query_by_key: where the query stands depends on the key.

    Raises:
        Unprintable: kernels do not compute it.
    """
    made = _Printer(mod, query_by_key, read(mod))
    score = "score"
    if mod.score is not None:
        found = made.values[mod.score]
        score = found.text if found.type == "float" else f"static_cast<float>({found.text})"
    result = score if mod.mask is None else f"{made.values[mod.mask].text} ? {score} : -INFINITY"
    lines = {tier: tuple(made.lines[tier]) for tier in ("query", "keys", "heads", "scores")}
    return Lines(**lines, kept=made.kept(), result=result, told=str(mod).removeprefix("carried: "))


def _tier(value: Value) -> str:
    """Where a value is computed."""
    if "score" in value.on or value.on >= {"k", "h"}:
        return "scores"
    return "keys" if "k" in value.on else "heads" if "h" in value.on else "query"


@dataclass
class _Printer:
    """Makes a line of every instruction."""

    mod: ScoreMod
    query_by_key: bool
    read: Mapping[int, torch.dtype]
    lines: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    values: dict[int, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in wanted(self.mod):
            instruction = self.mod.instructions[number]
            if instruction.torch_dtype not in ELEMENTS:
                raise Unprintable(f"its scores or its mask are computed in {instruction.dtype}")
            self.values[number] = self._value(f"e{number}", instruction)

    def _value(self, name: str, i: Instruction) -> Value:
        args, dtype = [self.values[arg] for arg in i.args], i.torch_dtype
        on = frozenset[str]().union(*(arg.on for arg in args))
        span: Range = (0, 0)
        match i.op:
            case "const":
                assert isinstance(i.value, (bool, int, float))
                return operators.number(i.value, dtype)
            case "score":
                return Value("score", dtype, frozenset(["score"]))
            case "q":
                on, span = frozenset("qk" if self.query_by_key else "q"), ranges.POSITIONS
                text = "std::max<int64_t>(query, 0)"
            case "k":
                on, text, span = frozenset("k"), _KEY, ranges.POSITIONS
            case "h":
                on, text, span = frozenset("h"), "head", ranges.HEADS
            case "leaf":
                assert isinstance(i.value, int)
                on |= frozenset(_ON[self.mod.leaves[i.value]])
                text, span = self._leaf(i.value, args)
            case "cast":
                text, span = operators.cast(args[0], dtype)
            case "where":
                text, span = operators.chosen(args, dtype)
            case _ if dtype is torch.bool:
                text, span = operators.claim(i.op, args), (0, 1)
            case _ if dtype.is_floating_point:
                text = operators.floating(i.op, args, dtype)
            case _:
                text, span = operators.integer(i.op, args, dtype)
        made = Value(name, dtype, on, span)
        self.lines[_tier(made)].append(f"const {made.type} {name} = {text};")
        return made

    def kept(self) -> tuple[tuple[str, str], ...]:
        """The values of keys that are needed where scores are."""
        needed = {number for number in (self.mod.score, self.mod.mask) if number is not None}
        for number, value in self.values.items():
            if _tier(value) == "scores":
                needed |= {*self.mod.instructions[number].args}
        values = [self.values[number] for number in sorted(needed)]
        return tuple(
            (value.type, value.text) for value in values if value.number is None and _tier(value) == "keys"
        )

    def _leaf(self, number: int, args: list[Value]) -> tuple[str, Range]:
        dtype = self.read[number]
        first = _FIRST[self.mod.leaves[number]].format(key=_KEY)
        places = ", ".join([*([first] if first else []), *(arg.text for arg in args)])
        text = f"element<{ELEMENTS[dtype]}>(leaf{number}{', ' if places else ''}{places})"
        if dtype.is_floating_point:
            return (f"to_float({text})" if dtype in operators.HALVES else text), (0, 0)
        return text, ranges.of_dtype(dtype)
