"""What sites do to their scores as expressions, in C++ kernels: against the oracle, and each operator by PyTorch."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from kvcompile.expression import SCORE, Expr, H, K, LeafKind, Q, ScoreMod, const, integer
from kvcompile.kernels.cpp.attend import expression
from kvcompile.kernels.cpp.attend.expression import printed, refusal
from kvcompile.kernels.cpp.host import ops
from kvcompile.kernels.cpp.host.compiler import built, flags_for
from kvcompile.kernels.cpp.host.leaves import leaves_of
from kvcompile.kernels.cpp.isa import VARIABLE, Isa, available, isa
from kvcompile.kernels.cpp.supports import refusal as site_refusal
from kvcompile.kernels.shared.expression import OPERATORS, Places, evaluate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Paged,
    Ring,
    SinkWindow,
    Slots,
    Window,
    int8,
    per_channel,
    uint,
    with_residual,
)
from kvcompile.specs import BiasSpec, RotaryForm, ScoreSpec
from tests.support import carried_scores as scores
from tests.support import dictionary
from tests.support.carried_scores import BOOL, FLOAT, INT, Carried, D, carried, cast, number, op, table
from tests.support.triton_attention import H2O, Case, check, ran


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


CARRIED: dict[str, Callable[[], Carried]] = {
    "dilated": scores.dilated,
    "blocks": scores.blocks,
    "behind": scores.behind,
    "windows": lambda: scores.windows(4),
    "buckets": lambda: scores.buckets(4),
    "buckets in bfloat16": lambda: scores.buckets(4, torch.bfloat16),
    "hinge": scores.hinge,
    "stacked": scores.stacked,
    "from the end": scores.from_the_end,
    "holes": scores.holes,
    "capped": scores.capped,
    "wide": scores.wide,
}
# More than a block of slots, several blocks of queries, and single tokens.
PLAIN = Case(CacheLayout(), (4, 2), chunks=(19, 1, 12, 1), pads=(0, 3))
LAYOUTS = {
    "int8 pages": replace(PLAIN, layout=CacheLayout(int8(), int8(), Paged(8))),
    "groups": replace(PLAIN, layout=CacheLayout(per_channel(4, 16, 16), with_residual(int8(), 5))),
    "window in a ring": replace(PLAIN, layout=CacheLayout(int8(), uint(4, 16), Ring(), Window(9))),
    "float16": replace(PLAIN, dtype=torch.float16, score=ScoreSpec(4.0, BiasSpec("alibi"), True)),
    "all padding": replace(PLAIN, pads=(0, 21, 2)),
    "by scores": replace(PLAIN, layout=CacheLayout(int8(), int8(), Slots(), H2O), chunks=(9, 1, 8, 1)),
    "by scores, residual": replace(
        PLAIN, layout=CacheLayout(with_residual(int8(), 5), int8(), Slots(), H2O), chunks=(9, 1, 8, 1)
    ),
}
IN_CACHE = {
    "ring": CacheLayout(int8(), int8(), Ring(), SinkWindow(3, 9, "in_cache")),
    "by scores": CacheLayout(int8(), placement=Slots(), retention=replace(H2O, positions="in_cache")),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CARRIED)
def test_expressions(name: str) -> None:
    check(replace(PLAIN, carried=CARRIED[name]()), "cpp")


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["holes", "behind", "stacked"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, name: str) -> None:
    check(replace(LAYOUTS[layout], carried=CARRIED[name]()), "cpp")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["behind", "windows", "buckets"])
@pytest.mark.parametrize("layout", IN_CACHE)
def test_places_in_the_cache(layout: str, name: str) -> None:
    """Positions that are counted in the cache: what goes by distance goes by those."""
    case = replace(PLAIN, layout=IN_CACHE[layout], rotary=RotaryForm("half", 0, 16), carried=CARRIED[name]())
    check(case, "cpp")


@pytest.mark.few(2)
@pytest.mark.parametrize("isa", [isa.name for isa in available()])
def test_every_instruction_set_and_number_of_threads(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, isa)
    ops.forget()
    case = replace(PLAIN, layout=LAYOUTS["int8 pages"].layout, carried=scores.capped(), chunks=(70, 1, 12, 1))
    check(case, "cpp")
    found = []
    for threads in (1, 5):
        torch.set_num_threads(threads)
        found.append(ran(case, "cpp").out)
    assert torch.equal(found[0][:, :, 3:], found[1][:, :, 3:])
    ops.forget()


# ---- what a model computes for tokens


def of_tokens(total: int, rows: int, one: bool = False) -> tuple[Carried, Callable[[int], scores.Plain]]:
    """A number for the query's token, one for the key's, one for each pair, and which pairs are seen; and what that is,
    by the row of the batch. one: pairs are the same in all rows."""
    g = torch.Generator().manual_seed(total)
    asked, held = torch.randn(rows, total, generator=g), torch.randn(rows, total, 2, generator=g)
    both = torch.randn(1 if one else rows, total, total, generator=g)
    shown = torch.rand(1 if one else rows, total, total, generator=g) < 0.6
    shown |= torch.eye(total, dtype=torch.bool)
    kinds: tuple[tuple[str, LeafKind], ...] = (
        ("asked", "query"),
        ("held", "key"),
        ("both", "pair"),
        ("shown", "pair"),
    )

    def leaf(name: str, dtype: torch.dtype, *places: Expr) -> Expr:
        return Expr("leaf", dtype, places, scores.Leaf(name, dict(kinds)[name]))

    added = op("add", leaf("both", FLOAT), op("mul", leaf("asked", FLOAT), leaf("held", FLOAT, integer(1))))
    made = carried(
        lambda s, q, k, h: s,
        op("add", SCORE, added),
        leaf("shown", BOOL),
        asked=asked,
        held=held,
        both=both,
        shown=shown,
    )
    mod = replace(made.mod, leaves=tuple(kind for _, kind in kinds))

    def plain(row: int) -> scores.Plain:
        of = 0 if one else row
        return lambda s, q, k, h: (
            s + float(both[of, q, k] + asked[row, q] * held[row, k, 1]) if shown[of, q, k] else None
        )

    return replace(made, mod=mod), plain


@pytest.mark.parametrize("one", [False, True], ids=["pairs of each row", "pairs of all"])
def test_what_a_model_computes_for_tokens(one: bool) -> None:
    made, plain = of_tokens(33, 2, one)
    case = replace(PLAIN, pads=(0, 0), carried=made)
    got = ran(case, "cpp").out
    q, k, v = case.qkv()
    wanted = [
        dictionary.attend(case.site, q[row], k[row], v[row], carried=plain(row)) for row in range(q.shape[0])
    ]
    own = ran(case, "reference").out.double() - torch.stack(wanted)
    off = float((got.double() - torch.stack(wanted)).abs().max())
    assert off <= 2 * float(own.abs().max()) + 64 * torch.finfo(torch.float32).eps * float(v.abs().max())


# ---- operator by operator

_HARNESS = """#include KV_VECTORS
#include "call.h"
#include "expression.h"
using namespace kv;
{functions}
extern "C" void run(const Tensor* leaves, int64_t number, int64_t queries, int64_t keys, int64_t heads,
                    const float* scores, float* out) {{
  static void (*const all[])(const Tensor*, int64_t, int64_t, int64_t, const float*, float*) = {{ {names} }};
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t q = 0; q < queries; ++q, scores += keys, out += keys) all[number](leaves, h, q, keys, scores, out);
}}
"""
_FUNCTION = """static void expression{number}(const Tensor* leaves, int64_t head, int64_t query, int64_t keys,
                                const float* scores, float* out) {{
  const int64_t batch = 0, row = query;
  {leaves}
  {query}
  {heads}
  for (int64_t key = 0; key < keys; ++key) {{
    const float score = scores[key];
    {keys}
    {scores}
    out[key] = {result};
  }}
}}
"""


class Seen(ctypes.Structure):
    """`Tensor` of `include/call.h`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dims", ctypes.c_int64),
        ("size", ctypes.c_int64 * 6),
        ("stride", ctypes.c_int64 * 6),
    )


def computed(mods: list[ScoreMod], leaves: list[Tensor], given: Tensor, own: Isa) -> list[Tensor]:
    """What the lines of mods give of scores [H, Q, K], all compiled in one file."""
    functions = []
    for n, mod in enumerate(mods):
        lines = printed(mod)
        named = [f"const Tensor& leaf{i} = leaves[{i}];" for i in range(len(leaves))]
        functions.append(
            _FUNCTION.format(
                number=n,
                leaves="\n  ".join(named),
                query="\n  ".join(lines.query),
                heads="\n  ".join(lines.heads),
                keys="\n    ".join(lines.keys),
                scores="\n    ".join(lines.scores),
                result=lines.result,
            )
        )
    names = ", ".join(f"expression{n}" for n in range(len(mods)))
    text = _HARNESS.format(functions="\n".join(functions), names=names)
    run = ctypes.CDLL(str(built("expressions", text, flags_for(own)))).run
    tensors = (Seen * max(1, len(leaves)))()
    for one, leaf in zip(tensors, leaves, strict=False):
        one.data, one.dims = leaf.data_ptr(), leaf.dim()
        one.size[: leaf.dim()], one.stride[: leaf.dim()] = tuple(leaf.shape), leaf.stride()
    found = []
    heads, queries, keys = given.shape
    for n in range(len(mods)):
        out = torch.empty_like(given)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (given, out)]
        run(tensors, *(ctypes.c_int64(x) for x in (n, queries, keys, heads)), *pointers)
        found.append(out)
    return found


def wanted_of(mod: ScoreMod, leaves: list[Tensor], given: Tensor) -> Tensor:
    """The same by PyTorch, operator by operator."""
    heads, queries, keys = given.shape
    places = Places(torch.arange(queries)[None], torch.arange(keys)[None], (heads, 1), leaves)
    wanted = [number for number in (mod.score, mod.mask) if number is not None]
    five = given[None, :, None]
    found = dict(zip(wanted, evaluate(mod, wanted, places, five), strict=True))
    score = five if mod.score is None else found[mod.score] + torch.zeros_like(five, dtype=torch.float64)
    shown = torch.tensor(True) if mod.mask is None else torch.as_tensor(found[mod.mask])
    return torch.where(shown, score.float(), -torch.inf)[0, :, 0]


# Of what is drawn: operators whose result PyTorch gives exactly, and those that it rounds as it likes.
WHOLE = (
    "add",
    "sub",
    "mul",
    "min",
    "max",
    "and",
    "or",
    "xor",
    "neg",
    "abs",
    "sign",
    "bitnot",
    "where",
    "const",
)
DIVIDED = ("floordiv", "truncdiv", "mod", "shl", "shr")
EXACT = (
    "add",
    "sub",
    "mul",
    "div",
    "min",
    "max",
    "neg",
    "abs",
    "sign",
    "floor",
    "ceil",
    "trunc",
    "round",
    "where",
)
ROUNDED = (
    *(
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sqrt",
        "rsqrt",
        "tanh",
        "sigmoid",
        "sin",
        "cos",
    ),
    *("atan", "erf", "silu", "softplus", "reciprocal", "pow", "mod", "truncdiv"),
)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Drawn:
    """Random expressions, of operators whose result is exact."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        g = torch.Generator().manual_seed(seed)
        whole = torch.randint(-(2**40), 2**40, (7, 5), generator=g)
        self.leaves = {
            "wide": whole,
            "bytes": whole.to(torch.uint8).T,
            "halves": (whole / 2.0**38).to(torch.bfloat16)[:, ::2],
            "shown": whole > 0,
            "doubles": whole.double() / 2.0**38,
        }

    def op(self, name: str, *args: Expr) -> Expr:
        """An operator of what is not numbers alone: translation has folded those."""
        if all(arg.is_const for arg in args):
            args = (self.cast(Q, args[0].dtype), *args[1:])
        return op(name, *args)

    def cast(self, x: Expr, dtype: torch.dtype) -> Expr:
        return cast(Q if x.is_const else x, dtype)

    def leaf(self, name: str) -> Expr:
        """At places within it, from either end, or beyond it where these are no numbers."""
        places = [self.whole(INT, 1) for _ in range(2)]
        known = [integer(self.pick.choice((-2, 0, 1)))] * 2
        chosen = [n if p.is_const else p for p, n in zip(places, known, strict=True)]
        return table(name, self.leaves[name].dtype, *chosen)

    def whole(self, dtype: torch.dtype, depth: int) -> Expr:
        if depth <= 0:
            limits = torch.iinfo(dtype)
            least, most = int(limits.min), int(limits.max)
            known = [n for n in (0, 1, -3, 7, 2**31, -(2**33), least, most) if least <= n <= most]
            return self.pick.choice(
                (*(self.cast(x, dtype) for x in (Q, K, D, H)), const(self.pick.choice(known), dtype))
            )
        name = self.pick.choice((*WHOLE, *DIVIDED, "leaf", "cast", "float"))
        a = lambda: self.whole(dtype, depth - 1)  # noqa: E731
        most = 30 if dtype is not INT else 62
        limit = torch.iinfo(dtype).max
        match name:
            case "const":
                return const(self.pick.choice((-2, 3, 100)) % (limit + 1), dtype)
            case "leaf":
                return self.cast(self.leaf(self.pick.choice(("wide", "bytes"))), dtype)
            case "cast":
                return self.cast(self.whole(self.pick.choice(INTS), depth - 1), dtype)
            case "float":
                # Floats that integers hold: what is beyond them is undefined in PyTorch, too.
                small = self.op(
                    "min", self.op("max", self.real(FLOAT, depth - 1), number(-99.0)), number(99.0)
                )
                small = self.op("where", self.op("eq", small, small), small, number(3.0))
                return self.cast(small, dtype) if dtype is not torch.uint8 else a()
            case "where":
                return self.op("where", self.claim(depth - 1), a(), a())
            case "floordiv" | "truncdiv" | "mod":
                return self.op(name, a(), const(self.pick.choice((1, 2, 3, 7, 100)), dtype))
            case "shl" | "shr":
                if dtype is torch.uint8:
                    return a()
                return self.op(
                    name, a(), const(self.pick.choice((0, 1, 3, 31)) % (most if most < 31 else 62), dtype)
                )
            case "neg" | "abs" | "sign" | "bitnot":
                return self.op(name, a())
            case _:
                return self.op(name, a(), a())

    def real(self, dtype: torch.dtype, depth: int) -> Expr:
        if depth <= 0:
            known = const(self.pick.choice((0.5, -3.0, 0.125)), dtype)
            return self.pick.choice((self.cast(SCORE, dtype), self.cast(D, dtype), known))
        name = self.pick.choice((*EXACT, "leaf", "cast", "whole"))
        a = lambda: self.real(dtype, depth - 1)  # noqa: E731
        match name:
            case "leaf":
                return self.cast(self.leaf(self.pick.choice(("halves", "doubles"))), dtype)
            case "cast":
                return self.cast(self.real(self.pick.choice(FLOATS), depth - 1), dtype)
            case "whole":
                return self.cast(self.whole(self.pick.choice(INTS), depth - 1), dtype)
            case "where":
                return self.op("where", self.claim(depth - 1), a(), a())
            case "div":  # not by 0, of which minima have either
                return self.op(name, a(), self.op("max", self.op("abs", a()), const(0.125, dtype)))
            case "add" | "sub" | "mul" | "min" | "max":
                return self.op(name, a(), a())
            case _:
                return self.op(name, a())

    def claim(self, depth: int) -> Expr:
        if depth <= 0:
            return self.pick.choice((self.op("eq", K, integer(3)), self.op("ge", Q, K)))
        name = self.pick.choice(("and", "or", "xor", "not", "eq", "ge", "gt", "cast", "leaf"))
        match name:
            case "leaf":
                return self.leaf("shown")
            case "cast":
                return self.cast(
                    self.pick.choice((self.whole(INT, depth - 1), self.real(FLOAT, depth - 1))), BOOL
                )
            case "not":
                return self.op("not", self.claim(depth - 1))
            case "eq" | "ge" | "gt":
                make = self.pick.choice((self.whole, self.real))
                dtype = self.pick.choice(INTS if make == self.whole else FLOATS)
                return self.op(name, make(dtype, depth - 1), make(dtype, depth - 1))
            case _:
                return self.op(name, self.claim(depth - 1), self.claim(depth - 1))


GIVEN = torch.randn(3, 9, 11, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
def test_any_expression_has_the_bits_of_pytorch(seed: int) -> None:
    drawn = Drawn(seed)
    mods, told = [], 0
    while len(mods) < 60:
        real = drawn.pick.random() < 0.5
        dtype = drawn.pick.choice(FLOATS if real else INTS)
        score = cast((drawn.real if real else drawn.whole)(dtype, 4), FLOAT)
        made = carried(
            lambda s, q, k, h: s, score, drawn.pick.choice((None, drawn.claim(3))), **drawn.leaves
        ).mod
        if (problem := refusal(made)) is not None:
            told += 1
            assert "beside" in problem or "kernels do not compute it" in problem, problem
            continue
        mods.append(made)
    assert told < 400
    leaves = list(drawn.leaves.values())
    for mod, found in zip(mods, computed(mods, leaves, GIVEN, isa()), strict=True):
        assert_same(found, wanted_of(mod, leaves, GIVEN), str(mod))


def assert_same(found: Tensor, wanted: Tensor, said: str) -> None:
    both = found.isnan() & wanted.isnan()
    assert torch.equal(found.masked_fill(both, 0), wanted.masked_fill(both, 0)), said


@pytest.mark.few(2)
@pytest.mark.parametrize("isa", [isa.name for isa in available()])
def test_functions(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them, of every dtype, at numbers of either sign, at 0, and at what is none: to a few units in the last
    place of the dtype, or of float32 where it is computed in that."""
    monkeypatch.setenv(VARIABLE, isa)
    given = torch.cat([GIVEN.flatten()[:-4] * 3, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])])
    given = given.reshape(GIVEN.shape)
    mods, names = [], []
    for name, dtype in product(ROUNDED, FLOATS):
        x = cast(SCORE, dtype)
        many = {
            "pow": [op("pow", x, const(e, dtype)) for e in (-2.0, -1.0, -0.5, 0.5, 2.0, 3.0, 1.5)]
            + [op("pow", const(2.0, dtype), x)],
            "mod": [op("mod", x, const(-0.75, dtype))],
            "truncdiv": [op("truncdiv", x, const(0.75, dtype))],
        }.get(name, [op(name, x)])
        for own in many:
            mod = carried(lambda s, q, k, h: s, cast(own, FLOAT)).mod
            if dtype in (torch.float16, torch.bfloat16) and name in ("pow", "mod", "truncdiv"):
                assert f"{name} of {dtype}" in str(refusal(mod))
                continue
            mods.append(mod)
            names.append((name, dtype))
    own = next(one for one in available() if one.name == isa)
    for (name, dtype), mod, found in zip(names, mods, computed(mods, [], given, own), strict=True):
        wanted = wanted_of(mod, [], given)
        there = wanted.isfinite()
        assert torch.equal(found.isnan(), wanted.isnan()), (name, dtype)
        assert torch.equal(found[~there & ~wanted.isnan()], wanted[~there & ~wanted.isnan()]), (name, dtype)
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        size = wanted[there].abs().clamp(min=1e-3)
        off = ((found[there] - wanted[there]).abs() / size).max()
        assert off <= 4 * eps, (name, dtype, float(off))


def test_every_operator_is_looked_at() -> None:
    looked = {*WHOLE, *DIVIDED, *EXACT, *ROUNDED, "not", "eq", "ge", "gt"}
    assert set(OPERATORS) <= looked


# ---- what stands in a kernel


def lines_of(e: Expr, **leaves: Tensor) -> dict[str, str]:
    mod = carried(lambda s, q, k, h: s, op("add", SCORE, cast(e, FLOAT)), **leaves).mod
    made = printed(mod)
    return {tier: "\n".join(getattr(made, tier)) for tier in ("query", "keys", "heads", "scores")}


def test_nothing_is_computed_more_often_than_it_changes() -> None:
    ones = torch.ones(4, dtype=INT)
    found = {tier: text for tier, text in lines_of(table("x", INT, H), x=ones).items() if "element" in text}
    assert list(found) == ["heads"]
    found = {tier: text for tier, text in lines_of(table("x", INT, D), x=ones).items() if "element" in text}
    assert list(found) == ["keys"]
    both = lines_of(table("x", INT, D, op("mul", H, integer(2))), x=torch.ones(4, 8, dtype=INT))
    assert [tier for tier, text in both.items() if "element" in text] == ["scores"]
    assert "query" in both["query"] and "head" in both["heads"] and "key" in both["keys"]
    assert len(printed(scores.buckets(4).mod).kept) == 1, "of a key, the bucket alone"
    by_key = printed(scores.behind().mod, query_by_key=True)
    assert not by_key.query and "query" in "".join(by_key.keys)


def test_integers_have_64_bits_only_where_32_do_not_hold_them() -> None:
    assert "const int64_t" not in "".join(lines_of(D).values())
    assert "const int64_t e" in lines_of(op("mul", op("add", Q, K), integer(4)))["keys"]
    any_of_them = op("mul", op("add", table("x", INT, H), K), integer(3))
    text = lines_of(any_of_them, x=torch.ones(4, dtype=INT))["scores"]
    assert "wrapped_add(" in text and "wrapped_mul(" in text, "what a weight holds may be anything"


X = table("x", INT, H)
ONES = torch.ones(4)
REFUSED: dict[str, tuple[ScoreMod, str]] = {}


def _refused(name: str, mod: ScoreMod, reason: str) -> None:
    REFUSED[name] = mod, reason


def _added(e: Expr, **leaves: Tensor) -> ScoreMod:
    return carried(lambda s, q, k, h: s, op("add", SCORE, cast(e, FLOAT)), **leaves).mod


_refused("a divisor that may be 0", _added(op("floordiv", D, X), x=ONES), "floordiv of torch.int64")
_refused("a shift by anything", _added(op("shl", D, X), x=ONES), "shl of torch.int64")
_refused("an operator that nobody knows", _added(op("new", cast(D, FLOAT))), "new of torch.float32")
_refused(
    "a number that bfloat16 has not",
    _added(op("mul", cast(D, torch.bfloat16), number(0.1, torch.bfloat16))),
    "the number 0.1 beside torch.bfloat16",
)
_refused("complex", _added(op("exp", cast(D, torch.complex64))), "computed in complex64")
_refused("seven dimensions", _added(table("x", INT, *[H] * 7), x=ONES), "a tensor of 7 dimensions")
_refused("two ways", _added(op("add", X, cast(table("x", INT, H, H), INT)), x=ONES), "is read in two ways")
_refused("weights", replace(scores.dilated().mod, weight=0), "weighed once more")
_refused("sums", replace(scores.dilated().mod, renormalise=0.0), "divided by its sum once more")


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_do_not_compute_has_a_reason(name: str) -> None:
    mod, reason = REFUSED[name]
    assert reason in str(refusal(mod))
    site = SiteSpec(CacheLayout(), 0.25, score=ScoreSpec(mod=mod))
    assert site_refusal(site, (4, 2), (16, 16), torch.float32) == refusal(mod)
    with pytest.raises(TypeError, match="its plan should have said so"):
        leaves_of(site, [])


def test_all_that_is_carried_here_has_kernels() -> None:
    assert {name: refusal(made().mod) for name, made in CARRIED.items()} == dict.fromkeys(CARRIED)


def test_leaves_come_in_the_dtype_that_is_read() -> None:
    made = scores.buckets(4)
    site = SiteSpec(CacheLayout(), 0.25, score=ScoreSpec(mod=made.mod))
    (leaf,) = leaves_of(site, [made.leaves[0].double()])
    assert leaf.dtype is torch.float32 and expression.read(made.mod) == {0: torch.float32}
    assert leaves_of(SiteSpec(CacheLayout(), 0.25), None) == []
