"""What a site does to its scores as an expression (`ScoreMod`), printed as Triton: the second printer of what
`kernels/shared/expression.py` evaluates, with the same result, rounding included.

| values | in a kernel |
|---|---|
| truth values | int1 |
| integers | 32 bits where `shared/ranges.py` shows that they fit, else 64; narrower dtypes wrap as PyTorch's do |
| float32 | float32: divisions and roots round to nearest, and a product is rounded before something is added to it |
| float16, bfloat16 | float32 that is rounded after every operator, which gives the same |

Integer `//` and `%` truncate on a GPU and round down in Triton's interpreter, so what may be negative is printed such
that both give Python's. Elements of weights are read where indexing says, counted from the end where that is negative;
what points beyond a weight is a key that no query sees, and reads some element.

What has no exact counterpart is refused: an operator is printed only if it stands here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kvcompile.expression import Instruction, ScoreMod
from kvcompile.kernels.shared import ranges
from kvcompile.kernels.shared.ranges import INT32, Range
from kvcompile.kernels.triton.helpers import stored
from kvcompile.kernels.triton.params import Param, ScalarParam, TensorParam

HALVES = (torch.float16, torch.bfloat16)
_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, *HALVES)
_ARITHMETIC = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}"}
_BITWISE = {"and": "&", "or": "|", "xor": "^"}
_COMPARED = {"eq": "==", "ge": ">=", "gt": ">"}
_WHOLE = {"floordiv": "floor_divided", "mod": "floor_remainder", "truncdiv": "trunc_divided"}
# Functions of one float32: what PyTorch computes, to the rounding of the functions themselves.
_FUNCTIONS = {
    "exp": "tl.exp({})",
    "exp2": "tl.exp2({})",
    "log": "tl.log({})",
    "log2": "tl.log2({})",
    "sqrt": "tl.sqrt_rn({})",
    "rsqrt": "tl.rsqrt({})",
    "tanh": "1.0 - 2.0 / (tl.exp2({} * " + repr(2 * math.log2(math.e)) + ") + 1.0)",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{}))",
    "floor": "tl.floor({})",
    "ceil": "tl.ceil({})",
    "trunc": "tl.where({0} >= 0.0, tl.floor({0}), tl.ceil({0}))",
    "reciprocal": "tl.div_rn(1.0, {})",
}
_POWERS = {
    -1.0: "tl.div_rn(1.0, {})",
    -0.5: "tl.rsqrt({})",
    0.5: "tl.sqrt_rn({})",
}


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
    def wide(self) -> bool:
        return not ranges.within(self.range, INT32)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def typed(self) -> str:
        """The value where a bare number would have no dtype, or another."""
        if self.number is None:
            return self.text
        kind = "float32" if self.is_float else "int1" if self.dtype is torch.bool else "int32"
        text = str(int(self.number)) if kind == "int1" else self.text
        return f"tl.full([1, 1], {text}, tl.{'int64' if self.wide else kind})"

    def in_bits(self, wide: bool) -> str:
        """An integer as one of 64 bits, or as it is."""
        return f"{self.text}.to(tl.int64)" if wide and not self.wide and self.number is None else self.text


@dataclass(frozen=True)
class Tensors:
    """The leaf tensors that a program reads: rank and dtype of each, by number."""

    found: Mapping[int, tuple[int, torch.dtype]]

    @property
    def params(self) -> tuple[Param, ...]:
        """Each dense, with the sizes of its dimensions; truth values as bytes."""
        made: list[Param] = []
        for number, (rank, dtype) in sorted(self.found.items()):
            taken = torch.uint8 if dtype is torch.bool else dtype
            made.append(TensorParam(f"leaf{number}", taken))
            made += [ScalarParam(f"leaf{number}_n{dim}") for dim in range(rank)]
        return tuple(made)


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


def tensors(mod: ScoreMod) -> Tensors:
    """Raises Unprintable where one is read in two ways."""
    found: dict[int, tuple[int, torch.dtype]] = {}
    for instruction in (mod.instructions[number] for number in wanted(mod)):
        if instruction.op == "leaf":
            assert isinstance(instruction.value, int)
            own = (len(instruction.args), instruction.torch_dtype)
            if found.setdefault(instruction.value, own) != own:
                raise Unprintable(f"one of its weights is read as {found[instruction.value]} and as {own}")
    return Tensors(found)


def refusal(mod: ScoreMod) -> str | None:
    """Why kernels do not compute it, or None."""
    if mod.weight is not None:
        return "what the softmax gives is weighed once more, which kernels do not do"
    if mod.renormalise is not None:
        return "what the softmax gives is divided by its sum once more, which kernels do not do"
    for kind, says in (
        ("query", "for the query's token"),
        ("key", "for every token"),
        ("pair", "for pairs of tokens"),
    ):
        if kind in mod.leaves:
            return f"its scores or its mask are computed from activations ({says}), and kernels read weights alone"
    try:
        Printer(mod, {name: name for name in ("query", "key", "heads")}, False)
    except Unprintable as reason:
        return str(reason)
    return None


@dataclass
class Printer:
    """The lines of a program.

    names: as `scores.after` has them
    rows:  lines that no key changes: they stand before the loop over tiles
    tile:  lines of a tile; `s` has the scores in base 2
    """

    mod: ScoreMod
    names: Mapping[str, str]
    interpreted: bool
    rows: list[str] = field(default_factory=list)
    tile: list[str] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors(self.mod)
        self._summed: set[int] = set()  # what is added to something
        for number in reversed(wanted(self.mod)):
            instruction = self.mod.instructions[number]
            if instruction.op in ("add", "sub") or (instruction.op == "neg" and number in self._summed):
                self._summed |= {*instruction.args}
        for number in wanted(self.mod):
            instruction = self.mod.instructions[number]
            if instruction.torch_dtype not in _DTYPES:
                raise Unprintable(f"its scores or its mask are computed in {instruction.dtype}")
            args = [self.values[arg] for arg in instruction.args]
            self.values[number] = self._value(number, instruction, args)

    def _value(self, number: int, i: Instruction, args: list[Value]) -> Value:
        name, on = f"e{number}", frozenset[str]().union(*(arg.on for arg in args))
        dtype = i.torch_dtype
        match i.op:
            case "const":
                return _number(i)
            case "q":
                on = frozenset("qk" if "key" in self.names["query"] else "q")
                text, span = f"tl.maximum({self.names['query']}, 0)", ranges.POSITIONS
            case "k":
                on = frozenset("k")
                text, span = f"tl.maximum({self.names['key']}, 0)[None, :]", ranges.POSITIONS
            case "h":
                on, text, span = frozenset("h"), f"{self.names['heads']}[:, None]", ranges.HEADS
            case "score":
                on, text, span = frozenset(["score"]), f"s * {math.log(2)!r}", (0, 0)
            case "leaf":
                text, span = self._leaf(name, i, args, on)
            case "cast":
                text, span = self._cast(args[0], dtype)
            case "where":
                text, span = self._where(args, dtype)
            case _ if dtype is torch.bool:
                text, span = self._claim(i.op, args), (0, 1)
            case _ if dtype.is_floating_point:
                rounds = number in self._summed and "score" not in on
                text, span = self._rounded(self._floating(i.op, args, dtype, rounds), dtype, i.op), (0, 0)
            case _:
                text, span = self._integer(i.op, args, dtype)
        self._line(on, f"{name} = {text}")
        return Value(name, dtype, on, span)

    def _line(self, on: frozenset[str], line: str) -> None:
        (self.tile if on & {"k", "score"} else self.rows).append(line)

    def _rounded(self, text: str, dtype: torch.dtype, op: str) -> str:
        """A float32 to the numbers that `dtype` has."""
        if dtype not in HALVES or op in ("min", "max", "neg", "abs"):
            return text
        return f"{stored(f'({text})', str(dtype).removeprefix('torch.'), self.interpreted)}.to(tl.float32)"

    # Operators.

    def _leaf(self, name: str, i: Instruction, args: list[Value], on: frozenset[str]) -> tuple[str, Range]:
        assert isinstance(i.value, int)
        pointer, dtype, places = f"leaf{i.value}_ptr", i.torch_dtype, []
        for dim, arg in enumerate(args):
            size = f"leaf{i.value}_n{dim}"
            text = arg.text
            if arg.number is not None:
                text = text if arg.number >= 0 else f"{size} - {-int(arg.number)}"
            elif arg.range[0] < 0:
                text = f"tl.where({text} < 0, {text} + {size}, {text})"
            low = f"tl.maximum({text}, 0)" if arg.range[0] < 0 else text
            clamped = f"tl.minimum({low}, {size} - 1)"
            places.append(f"{clamped}.to(tl.int32)" if arg.wide else clamped)
        at = places[0] if places else "0"
        if len(places) > 1:  # a table of positions may have more elements than 32 bits count
            self._line(on, f"{name}_at = tl.zeros([1, 1], tl.int64) + {at}")
            for dim, place in enumerate(places[1:], 1):
                self._line(on, f"{name}_at = {name}_at * leaf{i.value}_n{dim} + {place}")
            at = f"{name}_at"
        text = f"tl.load({pointer} + {at})"
        if dtype is torch.bool:
            return f"{text} != 0", (0, 1)
        if dtype.is_floating_point:
            return (text if dtype is torch.float32 else f"{text}.to(tl.float32)"), (0, 0)
        narrow = dtype not in (torch.int32, torch.int64)
        return (f"{text}.to(tl.int32)" if narrow else text), ranges.of_dtype(dtype)

    def _cast(self, a: Value, dtype: torch.dtype) -> tuple[str, Range]:
        if dtype is torch.bool:
            return f"{a.typed} != {'0.0' if a.is_float else '0'}", (0, 1)
        if dtype.is_floating_point:
            text = a.typed if a.is_float else f"{a.typed}.to(tl.float32)"
            same = a.dtype is dtype or dtype not in HALVES
            return (text if same else self._rounded(text, dtype, "cast")), (0, 0)
        if a.is_float:
            wide = dtype is torch.int64
            return self._wrapped(f"{a.typed}.to(tl.{'int64' if wide else 'int32'})", None, wide, dtype)
        if a.dtype is torch.bool:
            return f"{a.typed}.to(tl.int32)", (0, 1)
        return self._wrapped(a.typed, a.range, a.wide, dtype)

    def _where(self, args: list[Value], dtype: torch.dtype) -> tuple[str, Range]:
        claim, yes, no = args
        span = ranges.joined(yes.range, no.range)
        wide = not dtype.is_floating_point and not ranges.within(span, INT32)
        texts = []
        for one in (yes, no):
            if one.number is not None and one.is_float:
                one = _of_dtype(one, dtype)
            texts.append(one.typed if yes.number is not None or dtype is torch.bool else one.in_bits(wide))
        return f"tl.where({claim.typed}, {texts[0]}, {texts[1]})", span

    def _claim(self, op: str, args: list[Value]) -> str:
        if op == "not" and args[0].dtype is torch.bool:
            return f"~{args[0].typed}"
        if op in _BITWISE and all(arg.dtype is torch.bool for arg in args):
            return f" {_BITWISE[op]} ".join(arg.typed for arg in args)
        if op in _COMPARED and args[0].dtype is not torch.bool:
            a, b = args
            wide = not a.is_float and (a.wide or b.wide)
            self._plain(a)
            left = a.typed if a.number is not None else a.in_bits(wide)
            return f"{left} {_COMPARED[op]} {self._plain(b, wide)}"
        raise Unprintable(
            f"its scores or its mask have {op} of {args[0].dtype}, which kernels do not compute"
        )

    def _plain(self, a: Value, wide: bool = False) -> str:
        """An operand beside one that has a dtype."""
        return _exact(a) if a.is_float else a.in_bits(wide)

    def _floating(self, op: str, args: list[Value], dtype: torch.dtype, rounds: bool) -> str:
        a, b = args[0], args[-1]
        left = a.typed if a.number is not None else a.text
        _exact(a)
        match op:
            case "mul" if rounds and dtype is torch.float32 and not self.interpreted:
                return f"product({left}, {b.typed})"
            case "add" | "sub" | "mul":
                return _ARITHMETIC[op].format(left, self._plain(b))
            case "div" if b.number is not None and math.isfinite(b.number) and _power_of_two(b.number):
                return f"{left} * {_float(1 / float(b.number))}"
            case "div":
                _exact(b)
                return f"tl.div_rn({left}, {b.typed})"
            case "min" | "max":
                name = "minimum" if op == "min" else "maximum"
                return f"tl.{name}({left}, {self._plain(b)}, propagate_nan=tl.PropagateNan.ALL)"
            case "neg":
                return f"-{left}"
            case "abs":
                return f"tl.abs({left})"
            case "sign":
                return f"tl.where({left} > 0.0, 1.0, tl.where({left} < 0.0, -1.0, 0.0))"
            case "pow" if a.number == 2.0:
                return f"tl.exp2({b.typed})"
            case "pow" if b.number in _POWERS and dtype is torch.float32:
                assert b.number is not None
                return _POWERS[float(b.number)].format(left)
        if op not in _FUNCTIONS:
            raise Unprintable(f"its scores or its mask have {op} of {dtype}, which kernels do not compute")
        return _FUNCTIONS[op].format(left)

    def _integer(self, op: str, args: list[Value], dtype: torch.dtype) -> tuple[str, Range]:
        span = ranges.of(op, [arg.range for arg in args])
        shift = op in ("shl", "shr")
        known = span is not None and all(arg.dtype is dtype for arg in args)
        if span is None or not known or (shift and dtype is not torch.int64 and args[1].range[1] > 30):
            raise Unprintable(
                f"its scores or its mask have {op} of {', '.join(str(arg.dtype) for arg in args)}, and of such numbers "
                "kernels do not compute it"
            )
        a, b = args[0], args[-1]
        wide = dtype is torch.int64 and (
            not ranges.within(span, INT32) or any(arg.wide for arg in args) or (shift and b.range[1] > 30)
        )
        left = a.typed if a.number is not None else a.in_bits(wide)
        if a.number is not None and wide and not a.wide:
            left = f"{left}.to(tl.int64)"
        right = b.in_bits(wide)
        match op:
            case "add" | "sub" | "mul":
                text = _ARITHMETIC[op].format(left, right)
            case "and" | "or" | "xor":
                text = f"{left} {_BITWISE[op]} {right}"
            case "shl" | "shr":
                text = f"{left} {'<<' if op == 'shl' else '>>'} {right}"
            case "min" | "max":
                text = f"tl.{'minimum' if op == 'min' else 'maximum'}({left}, {right})"
            case "neg":
                text = f"0 - {left}"
            case "bitnot":
                text = f"-1 - {left}"
            case "abs":
                text = f"tl.abs({left})"
            case "sign":
                text = f"tl.where({left} > 0, 1, tl.where({left} < 0, -1, 0))"
            case _ if a.range[0] >= 0:
                text = f"{left} {'%' if op == 'mod' else '//'} {right}"
            case _:
                text = f"{_WHOLE[op]}({left}, {right})"
        return self._wrapped(text, span, wide, dtype)

    def _wrapped(self, text: str, span: Range | None, wide: bool, dtype: torch.dtype) -> tuple[str, Range]:
        """An integer that was computed in 32 or 64 bits, as its dtype has it; span: without that, None: anything."""
        limits = ranges.of_dtype(dtype)
        if span is not None and ranges.within(span, limits):
            narrow = wide and ranges.within(span, INT32)
            return (f"({text}).to(tl.int32)" if narrow else text), span
        if dtype is torch.int64:
            return text, limits
        name = str(dtype).removeprefix("torch.")
        again = "" if dtype is torch.int32 else ".to(tl.int32)"
        return (f"({text}).to(tl.{name}){again}" if wide or again else text), limits


def _number(i: Instruction) -> Value:
    dtype, value = i.torch_dtype, i.value
    assert isinstance(value, (bool, int, float))
    if dtype is torch.bool:
        return Value(str(bool(value)), dtype, range=(int(value), int(value)), number=bool(value))
    if dtype.is_floating_point:
        return Value(_float(float(value)), dtype, number=float(value))
    return Value(
        str(value) if value >= 0 else f"({value})", dtype, range=(int(value),) * 2, number=int(value)
    )


def _float(value: float) -> str:
    """A float32 in Triton's text."""
    rounded = float(torch.tensor(value, dtype=torch.float32))
    if not math.isfinite(rounded):
        return f'float("{rounded}")'
    return repr(value) if value >= 0 and repr(value)[0] != "-" else f"({value!r})"


def _of_dtype(a: Value, dtype: torch.dtype) -> Value:
    """A number rounded to a dtype."""
    assert a.number is not None
    value = float(torch.tensor(float(a.number), dtype=dtype))
    return Value(_float(value), dtype, number=value)


def _exact(a: Value) -> str:
    """A number beside a half: only one that the half has, since not every operator of PyTorch rounds it."""
    if a.number is None or a.dtype not in HALVES or math.isnan(a.number):
        return a.text
    if _of_dtype(a, a.dtype).number != a.number:
        raise Unprintable(
            f"its scores or its mask have the number {a.number} beside {a.dtype}, which has no such number"
        )
    return a.text


def _power_of_two(value: float) -> bool:
    return value != 0 and abs(math.frexp(value)[0]) == 0.5 and abs(math.frexp(value)[1]) < 120
