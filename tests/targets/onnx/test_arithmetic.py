"""Arithmetic in ONNX Runtime is PyTorch's own: integers of any sign and size, remainders, shifts, narrow dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from kvcompile.expression import Expr, H, LeafKind, Q, ScoreMod, const, integer, program
from kvcompile.kernels.shared.dialect import ONNX, speaking
from kvcompile.kernels.shared.expression import Places, evaluate
from kvcompile.targets.onnx.graph import OPSETS, _translated
from tests.support.carried_scores import op, table

onnxruntime = pytest.importorskip("onnxruntime")
Results = dict[str, Tensor]


def ran(function: Callable[..., Results], given: tuple[Tensor, ...], opset: int = OPSETS[-1]) -> Results:
    """What the function's graph gives in ONNX Runtime; the first dimension of all that is given may change."""
    names = list(function(*given))

    class Module(nn.Module):
        def forward(self, *own: Tensor) -> tuple[Tensor, ...]:
            return tuple(function(*own).values())

    with speaking(ONNX), torch.no_grad():
        sizes = tuple({0: Dim.DYNAMIC} for _ in given)
        exported = torch.export.export(Module(), given, dynamic_shapes=(sizes,), strict=False)
    model = ir.serde.serialize_model(_translated(exported, opset, "of a test"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    known = {i.name: x.numpy() for i, x in zip(session.get_inputs(), given, strict=True)}
    return {n: torch.from_numpy(x) for n, x in zip(names, session.run(None, known), strict=True)}


def same(function: Callable[..., Results], *given: Tensor, opset: int = OPSETS[-1]) -> None:
    want, found = function(*given), ran(function, given, opset)
    differ = {
        name: [(t[bad][:3].tolist()) for t in (*given, want[name], found[name])]
        for name in want
        if want[name].shape != given[0].shape
        or (bad := (want[name] != found[name]) & ~(want[name].isnan() & found[name].isnan())).any()
    }
    assert not differ, f"given, wanted, found: {differ}"
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in want.items()}


# Numbers around 0, those that 32 bits, float32 or float64 do not hold, and the ends of int64 (whose least has no
# quotient by -1).
WHOLE = [*range(-9, 10), 1000, -1000, 2**24 + 1, -(2**31) - 5, 2**31, 2**40 + 3, -(2**53) - 1, 2**63 - 1]
X, Y = (
    torch.tensor(column).clone()
    for column in zip(*itertools.product([*WHOLE, 1 - 2**63], WHOLE), strict=True)
)


def quotients(x: Tensor, y: Tensor) -> Results:
    y = torch.where(y == 0, 7, y)
    return {
        "//": x // y,
        "%": x % y,
        "div, floor": torch.div(x, y, rounding_mode="floor"),
        "div, trunc": torch.div(x, y, rounding_mode="trunc"),
        "fmod": torch.fmod(x, y),
        "// 3": x // 3,
        "// -3": x // -3,
        "% 3": x % 3,
        "% -3": x % -3,
        "17 //": 17 // y,
        "-17 %": -17 % y,
        "trunc by 4": torch.div(x, 4, rounding_mode="trunc"),
        "floor by -4": torch.div(x, -4, rounding_mode="floor"),
        "of int32": ((x % 4001 - 2000).int() // y.clamp(1, 99).int()).long(),
    }


def extremes(x: Tensor, y: Tensor) -> Results:
    return {
        "minimum": torch.minimum(x, y),
        "maximum": torch.maximum(x, y),
        "clamp": x.clamp(-5, 2**40),
        "at least": x.clamp(min=-5),
        "at most": x.clamp(max=5),
        "by a tensor": torch.clamp(x, max=y),
        "sign": x.sign(),
        "of int32": torch.minimum(x.int(), y.int()).clamp(-5, 900),
        "int16": x.short().clamp(min=-5),
        "absolute": x.abs() - x.neg(),
        "compared": (x < y).long() + (x >= y) * 2 + (x == y) * 4,
    }


def bits(x: Tensor, y: Tensor) -> Results:
    by = y.clamp(0, 80)  # beyond the bits there are
    return {
        "and": (x & y) + (x & 6),
        "or": (x | y) ^ (x | 6),
        "not": ~x,
        "left": x << by,
        "right": x >> by,
        "left by 2": x << 2,
        "right by 2": x >> 2,
        "right by 63": torch.bitwise_right_shift(x, 63),
        "left by 70": torch.bitwise_left_shift(x, 70),
        "a number left": torch.bitwise_left_shift(5, by),
        "int32, left": (x.int() << by.int()).long(),
        "int32, right": (x.int() >> by.int()).long(),
        "uint8, left": (x.to(torch.uint8) << 3).long(),
        "uint8, right": (x.to(torch.uint8) >> 3).long(),
        "int8, left": (x.to(torch.int8) << 3).long(),
    }


def claims(x: Tensor, y: Tensor) -> Results:
    a, b = x % 3 == 0, y > 2
    return {
        "counted": a.cumsum(0),
        "counted before": a.cumsum(0) - a.long(),
        "counted in int32": b.cumsum(0, dtype=torch.int32),
        "of bytes": a.to(torch.uint8).cumsum(0),
        "compared": (a == b).long() + (a > b) * 2 + (a <= b) * 4,
        "combined": (a ^ b) | (a & ~b),
        "product": a * b,
        "with integers": a * x + b,
        "any": a | (x & 1).bool(),
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("function", [quotients, extremes, bits, claims], ids=lambda f: str(f.__name__))
def test_integers(function: Callable[..., Results]) -> None:
    same(function, X, Y)


def test_integers_in_an_older_opset() -> None:
    same(bits, X, Y, opset=OPSETS[0])


def rounded(x: Tensor, y: Tensor) -> Results:
    low = x.clamp(-1e30, 1e30)
    y = torch.where(y == 0, 0.7, y)
    finite = torch.where(y.isinf(), 3.0, y)
    powers = torch.exp2((x.abs().clamp(max=900) // 7).clamp(max=120))
    return {
        "%": low % y,
        "% 0.1": low % 0.1,
        "% -0.3": low % -0.3,
        "fmod": torch.fmod(low, y),
        "//": low // finite,
        "// 0.1": low // 0.1,
        "by 0": x // (y * 0.0),
        "0.1 //": 0.1 // finite,
        "div, floor": torch.div(low, finite, rounding_mode="floor"),
        "div, trunc": torch.div(low, finite, rounding_mode="trunc"),
        "at most": x.clamp(max=3.0),
        "at least": x.clamp(min=-2.5),
        "between": x.clamp(-2.5, 3.0),
        "extremes": torch.minimum(x, y) + torch.maximum(x, y) * 0.5,
        "log2 of powers of two": powers.log2(),
        "rounding": x.round() + x.trunc() + x.floor() * 2 + x.ceil(),
    }


def test_floats() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(400, generator=generator) * 30, torch.arange(-50, 50) * 0.1])
    x = torch.cat([x, torch.tensor([0.0, 1e-8, -1e-8, torch.inf, -torch.inf, torch.nan])])
    same(rounded, x, x.roll(7))


# ---- carried expressions in narrow dtypes

FLOATS = "add sub mul div min max eq ge gt neg abs floor ceil round trunc sqrt reciprocal"
INTEGERS = "add sub mul floordiv mod truncdiv min max eq ge gt and or xor shl shr neg abs bitnot sign"
ALONE = ("neg", "abs", "floor", "ceil", "round", "trunc", "sqrt", "reciprocal", "bitnot", "sign")


def roots(name: str, dtype: torch.dtype) -> dict[str, Expr]:
    """Every operator on two tables, on one and a number, and one after another."""
    x, y = table(f"x {name}", dtype, Q), table(f"y {name}", dtype, Q)
    made: dict[str, Expr] = {}
    for operator in (FLOATS if dtype.is_floating_point else INTEGERS).split():
        if operator in ALONE:
            made[f"{name} {operator}"] = op(operator, op("abs", x) if operator == "sqrt" else x)
            continue
        right = op("and", y, const(7, dtype)) if operator in ("shl", "shr") else y
        right = op("or", y, const(1, dtype)) if operator in ("floordiv", "mod", "truncdiv") else right
        made[f"{name} {operator}"] = op(operator, x, right)
        if x.is_float or operator in ("mul", "shl"):
            made[f"{name} {operator} number"] = op(operator, x, const(0.1 if x.is_float else 3, dtype))
    made[f"{name} chained"] = op("add", op("mul", op("sub", x, y), y), x)
    made[f"{name} of places"] = op("mul", Expr("cast", dtype, (Q,)), Expr("cast", dtype, (op("add", Q, Q),)))
    made[f"{name} where"] = op("where", op("gt", x, y), x, const(0.1 if x.is_float else 5, dtype))
    return {
        n: e if e.is_bool else Expr("cast", torch.float32 if e.is_float else torch.int64, (e,))
        for n, e in made.items()
    }


def narrow(dtypes: dict[str, torch.dtype], count: int) -> tuple[Callable[..., Results], list[Tensor]]:
    wanted = {name: e for key, dtype in dtypes.items() for name, e in roots(key, dtype).items()}
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for key, dtype in dtypes.items():
        for column in ("x", "y"):
            drawn = torch.randn(count, generator=generator)
            if dtype.is_floating_point:
                tensors[f"{column} {key}"] = (drawn * 8).to(dtype)
            else:
                least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
                whole = torch.randint(least, most + 1, (count,), generator=generator)
                tensors[f"{column} {key}"] = whole.to(dtype)
    names = list(tensors)
    instructions, numbers = program(dict(wanted), lambda leaf: names.index(leaf.name))
    kinds: tuple[LeafKind, ...] = ("table",) * len(names)
    mod = ScoreMod(instructions, kinds)
    asked = [number for number in numbers.values() if number is not None]

    def function(query: Tensor) -> Results:
        places = Places(query[None], torch.zeros(1, 1, dtype=torch.int64), (1, 1), list(tensors.values()))
        found = evaluate(mod, asked, places)
        return {n: x.reshape(query.shape) for n, x in zip(wanted, found, strict=True)}

    return function, [torch.arange(count)]


@pytest.mark.parametrize(
    "dtypes",
    [
        {"float16": torch.float16, "bfloat16": torch.bfloat16},
        {"uint8": torch.uint8, "int16": torch.int16},
        pytest.param({"int8": torch.int8}, marks=pytest.mark.slow),  # as int16, which has no shifts
    ],
    ids=lambda dtypes: " ".join(dtypes),
)
def test_carried_expressions_round_and_wrap_as_pytorch_does(dtypes: dict[str, torch.dtype]) -> None:
    function, given = narrow(dtypes, 3000)
    same(function, *given)


def test_claims_and_places_of_heads() -> None:
    """What exporters alone stumble over: a sum of truth values, a shift of symbolic sizes by a head."""
    odd = op("eq", op("and", Q, integer(1)), integer(1))
    late = op("ge", Q, integer(90))
    mod = ScoreMod(
        *program(
            {
                "either": op("add", odd, late, dtype=torch.bool),
                "shifted": op("shr", Q, op("add", H, integer(1))),
            },
            lambda leaf: 0,
        )[:1]
    )

    def function(query: Tensor) -> Results:
        wanted = [len(mod.instructions) - 1, next(n for n, i in enumerate(mod.instructions) if i.op == "add")]
        places = Places(query[None], torch.zeros(1, 1, dtype=torch.int64), (1, 1))
        shifted, either = evaluate(mod, wanted, places)
        return {"shifted": shifted.reshape(query.shape), "either": either.reshape(query.shape)}

    same(function, torch.arange(200))
