"""What sites do to their scores as expressions, in generated kernels: against the reference and an oracle in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from kvcompile.expression import SCORE, Expr, H, K, Q, ScoreMod, integer
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.shared import ranges
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.host.attention import cached_attention
from kvcompile.kernels.triton.host.launches import launches
from kvcompile.kernels.triton.supports import refusal as site_refusal
from kvcompile.kernels.triton.tile.expression import Printer, refusal
from kvcompile.kernels.triton.tools.assemble import Request, assemble
from kvcompile.kernels.triton.tools.synthetic_cache import sample
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
from tests.support.carried_scores import Carried, D, carried, cast, number, op, table
from tests.support.kernel_specs import H200
from tests.support.triton_attention import H2O, Case, check
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
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
# More than a tile of slots before the last pass, and single tokens.
PLAIN = Case(CacheLayout(), (4, 2), chunks=(19, 1, 12, 1), pads=(0, 3))
LAYOUTS = {
    "int8 pages": replace(PLAIN, layout=CacheLayout(int8(), int8(), Paged(8))),
    "groups": replace(PLAIN, layout=CacheLayout(per_channel(4, 16, 16), with_residual(int8(), 5))),
    "window in a ring": replace(PLAIN, layout=CacheLayout(int8(), uint(4, 16), Ring(), Window(9))),
    "float16": replace(PLAIN, dtype=torch.float16, score=ScoreSpec(4.0, BiasSpec("alibi"), True)),
    "all padding": replace(PLAIN, pads=(0, 21, 2)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CARRIED)
def test_expressions(name: str) -> None:
    check(replace(PLAIN, carried=CARRIED[name]()))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["behind", "stacked", "holes"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, name: str) -> None:
    check(replace(LAYOUTS[layout], carried=CARRIED[name]()))


@pytest.mark.parametrize("name", ["behind", "windows", "buckets"])
def test_places_in_the_cache(name: str) -> None:
    """Positions that are counted in the cache: what goes by distance goes by those."""
    layout = CacheLayout(int8(), int8(), Ring(), SinkWindow(3, 9, "in_cache"))
    check(replace(PLAIN, layout=layout, rotary=RotaryForm("half", 0, 16), carried=CARRIED[name]()))


@pytest.mark.parametrize("name", ["hinge", "blocks", "stacked"])
def test_retention_by_scores(name: str) -> None:
    check(
        replace(
            PLAIN,
            layout=CacheLayout(int8(), int8(), Slots(), H2O),
            chunks=(9, 1, 8, 1),
            carried=CARRIED[name](),
        )
    )


# ---- what stands in a kernel


def printed(mod: ScoreMod, interpreted: bool = False) -> str:
    names = {"query": "position[:, None]", "key": "key", "heads": "heads"}
    made = Printer(mod, names, interpreted)
    return "\n".join([*made.rows, "--", *made.tile])


def scored(e: Expr, **leaves: torch.Tensor) -> ScoreMod:
    """Scores to which the expression is added, as float32."""
    return carried(lambda s, q, k, h: s, op("add", SCORE, cast(e, torch.float32)), **leaves).mod


def test_what_no_key_changes_stands_before_the_loop() -> None:
    mod = scores.buckets(4).mod
    before, after = printed(mod).split("--")
    assert "position" in before and "heads" in before and "tl.load" not in before
    assert "tl.load" in after and "s * " in after
    alone = printed(scored(table("x", torch.int64, H), x=torch.ones(4, dtype=torch.int64))).split("--")
    assert "tl.load" in alone[0] and "tl.load" not in alone[1]


def test_integers_have_64_bits_only_where_32_do_not_hold_them() -> None:
    assert "int64" not in printed(scores.behind().mod)
    assert ".to(tl.int64)" in printed(scores.wide().mod)
    twice = op("mul", op("add", Q, K), integer(2))
    assert "int64" in printed(scored(twice))
    # What a weight gives is anything that its dtype holds, until it is cut off.
    x = table("x", torch.int64, H)
    assert ".to(tl.int64)" in printed(scored(op("mul", x, Q), x=torch.ones(4)))
    cut = op("max", op("min", x, integer(31)), integer(0))
    assert ".to(tl.int64)" not in printed(scored(op("add", cut, Q), x=torch.ones(4)))
    assert ".to(tl.int32)" in printed(scored(op("add", cut, Q), x=torch.ones(4)))


def test_products_are_rounded_before_something_is_added() -> None:
    mod = scored(op("floor", op("add", op("mul", cast(D, torch.float32), number(0.1)), number(0.5))))
    assert "product(e" in printed(mod) and "product(" not in printed(mod, interpreted=True)
    assert "product(" not in printed(scores.capped().mod)  # of scores, which are sums in any order


@pytest.mark.parametrize(
    "name", ["floordiv", "truncdiv", "mod", "and", "or", "xor", "add", "sub", "mul", "min", "max"]
)
def test_ranges_hold_every_value(name: str) -> None:
    """All pairs of small numbers, over intervals on both sides of 0."""
    plain: dict[str, Callable[[int, int], int]] = {
        "floordiv": lambda x, y: x // y,
        "truncdiv": lambda x, y: int(x / y),
        "mod": lambda x, y: x % y,
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "min": min,
        "max": max,
    }
    ends = [(-9, -3), (-6, 7), (0, 5), (2, 2), (4, 13)]
    for a, b in product(ends, ends):
        found = ranges.of(name, [a, b])
        if found is None:
            assert name in ("floordiv", "truncdiv", "mod") and b[0] <= 0
            continue
        values = [plain[name](x, y) for x in range(a[0], a[1] + 1) for y in range(b[0], b[1] + 1)]
        assert found[0] <= min(values) and max(values) <= found[1], (name, a, b)


@pytest.mark.parametrize("name", ["neg", "abs", "bitnot", "shl", "shr"])
def test_ranges_of_one(name: str) -> None:
    for a in ((-9, -3), (-6, 7), (0, 5), (4, 13)):
        by = [(2, 2)] if name in ("shl", "shr") else []
        found = ranges.of(name, [a, *by])
        plain = {"neg": lambda x: -x, "abs": abs, "bitnot": lambda x: ~x}
        plain |= {"shl": lambda x: x << 2, "shr": lambda x: x >> 2}
        values = [plain[name](x) for x in range(a[0], a[1] + 1)]
        assert found == (min(values), max(values))


# ---- what is refused


X = table("x", torch.int64, H)
REFUSED: dict[str, tuple[ScoreMod, str]] = {
    "a divisor that may be 0": (scored(op("floordiv", D, X), x=torch.ones(4)), "floordiv of torch.int64"),
    "a shift by anything": (scored(op("shl", D, X), x=torch.ones(4)), "shl of torch.int64"),
    "a sine": (scored(op("sin", cast(D, torch.float32))), "sin of torch.float32"),
    "any power": (scored(op("pow", cast(Q, torch.float32), cast(K, torch.float32))), "pow of torch.float32"),
    "float64": (scored(op("exp", cast(D, torch.float64))), "computed in float64"),
    "a number that bfloat16 has not": (
        scored(op("mul", cast(D, torch.bfloat16), number(0.1, torch.bfloat16))),
        "the number 0.1 beside torch.bfloat16",
    ),
    "a remainder of floats": (
        scored(op("mod", cast(D, torch.float32), number(3.0))),
        "mod of torch.float32",
    ),
    "an operator that nobody knows": (scored(op("new", cast(D, torch.float32))), "new of torch.float32"),
    "weights": (replace(scores.dilated().mod, weight=0), "weighed once more"),
    "sums": (replace(scores.dilated().mod, renormalise=0.0), "divided by its sum once more"),
    **{
        kind: (replace(scores.windows(2).mod, leaves=(kind,)), "computed from activations")  # type: ignore[arg-type]
        for kind in ("query", "key", "pair")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_do_not_compute_has_a_reason(name: str) -> None:
    mod, reason = REFUSED[name]
    assert reason in str(refusal(mod))
    site = SiteSpec(CacheLayout(), 0.25, score=ScoreSpec(mod=mod))
    assert site_refusal(site, (4, 2), (16, 16), torch.float32) == refusal(mod)


def test_all_that_is_carried_here_has_kernels() -> None:
    assert {name: refusal(made().mod) for name, made in CARRIED.items()} == dict.fromkeys(CARRIED)


def test_a_call_that_no_plan_makes_is_an_error() -> None:
    site = SiteSpec(CacheLayout(), 0.25, score=ScoreSpec(mod=REFUSED["a sine"][0]), kernels="triton")
    x, at = torch.zeros(1, 2, 1, 16), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"sin of torch\.float32"):
        cached_attention(AttendInputs(x, x, x, [], at, at[0], [], 1, site, leaves=[]))


def test_there_is_no_sample_of_expressions() -> None:
    site = SiteSpec(CacheLayout(), 0.25, score=ScoreSpec(mod=scores.dilated().mod))
    with pytest.raises(ValueError, match=r"no sample of a site with .*mask"):
        sample(site, (2, 1), (16, 16), [3], torch.float32, torch.device("cpu"))


# ---- ahead of time


ALL = ("stacked", "buckets in bfloat16", "behind", "windows", "capped", "wide")


@pytest.mark.parametrize(
    "kernels",
    [
        [("stacked", "prefill"), ("buckets in bfloat16", "decode")],
        pytest.param(list(product(ALL, ("decode", "prefill"))), marks=pytest.mark.slow),
    ],
    ids=["two", "all"],
)
def test_they_assemble(kernels: list[tuple[str, str]]) -> None:
    """For sm_90, with no GPU: decode and prefill of every expression, with no spill in the main loop."""
    asked: dict[str, Request] = {}
    for name in dict(kernels):
        site = SiteSpec(CacheLayout(), 128**-0.5, score=ScoreSpec(mod=CARRIED[name]().mod))
        for tokens in (1, 64):
            for launch in launches(site, (4, 2), (128, 128), torch.bfloat16, H200, tokens):
                if (name, launch.spec.role) in kernels:
                    request = Request(launch.spec, 90, launch.num_warps, launch.num_stages, launch.known)
                    asked[f"{name}, {launch.spec.role}"] = request
    made = dict(zip(asked, assemble(asked.values()), strict=True))
    assert len(made) == len(kernels)
    assert not {name: one.loop_spills for name, one in made.items() if one.loop_spills}
    assert all(one.products for one in made.values())


def test_equal_expressions_are_one_kernel() -> None:
    """Whatever the tensors hold: a spec has the expression, and not its weights."""
    first, second = (
        launches(
            SiteSpec(CacheLayout(), 0.25, score=ScoreSpec(mod=mod)), (4, 2), (16, 16), torch.float32, H200
        )
        for mod in (scores.windows(2).mod, scores.windows(4).mod)
    )
    assert [one.spec.key for one in first] == [one.spec.key for one in second]
    other = launches(
        SiteSpec(CacheLayout(), 0.25, score=ScoreSpec(mod=scores.dilated().mod)),
        (4, 2),
        (16, 16),
        torch.float32,
        H200,
    )
    assert {one.spec.key for one in other}.isdisjoint(one.spec.key for one in first)
    assert "leaf0_ptr" in generate(next(one.spec for one in first if one.spec.role == "decode")).text
