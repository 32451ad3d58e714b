"""C++ kernels of sites against the oracle and the reference: layouts, masks, scores, instruction sets, threads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvcompile.kernels.cpp.host import attention, ops, prefill, source
from kvcompile.kernels.cpp.isa import VARIABLE, Isa, available
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.kernels.ops import cached_attention as op
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    InKeys,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    TopPages,
    Window,
    fp8,
    int8,
    mxfp4,
    nf4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from tests.support import carried_scores
from tests.support.marks import cases
from tests.support.triton_attention import H2O, Case, case_of, check, oracle, ran, real

ALL, SINKS = ScoreSpec(4.0, BiasSpec("alibi"), True), ScoreSpec(sinks=True)
ONES = (1,) * 14  # every token by the kernel, so what nobody wrote is not even a number
# One of each kind of storage, placement, retention, selection, rotation and score; a kernel takes a second to compile.
CASES = {
    "plain": Case(CacheLayout(), (6, 2), (64, 40), chunks=ONES),
    "two pieces": Case(CacheLayout(), chunks=(140, 1), pads=(0, 30)),
    "half": Case(CacheLayout(), (3, 1), (32, 32), torch.bfloat16, score=ALL, chunks=ONES),
    "int8": Case(CacheLayout(int8(), int8()), (4, 2), (24, 16), torch.float16, chunks=ONES),
    "pages": Case(CacheLayout(uint(4, 16), fp8(scale="none"), Paged(16)), (5, 1), (80, 32), chunks=ONES),
    "released": Case(
        CacheLayout(int8(), int8(), Paged(16, released=True), SinkWindow(3, 70)),
        (4, 2),
        mask=MaskSpec("sliding", 90),
        chunks=(110, 1, 1, 26, 1, 1),
        pads=(0, 41),
    ),
    "released, many sinks": Case(
        CacheLayout(int8(), uint(4, 16), Paged(8, released=True), SinkWindow(70, 20, "in_cache")),
        (2, 1),
        rotary=RotaryForm("half", 0, 16),
        chunks=(110, 1, 20, 1, 1),
        pads=(0, 9),
    ),
    "pages by turns": Case(
        CacheLayout(placement=Paged(32)), (4, 2), (48, 16), score=SINKS, chunks=(20, 1, 1)
    ),
    "ring": Case(
        CacheLayout(fp8("e5m2"), int8(), Ring(), SinkWindow(3, 6)),
        (4, 2),
        rotary=RotaryForm("half", 0, 16),
        chunks=ONES,
    ),
    "in cache": Case(
        CacheLayout(uint(3, 8), nf4(16), Paged(8), SinkWindow(3, 6, "in_cache")),
        (2, 2),
        rotary=RotaryForm("interleaved", 8, 8),
        score=ScoreSpec(bias=BiasSpec("relative")),
        chunks=ONES,
    ),
    "window, chunked": Case(
        CacheLayout(with_hadamard(int8()), mxfp4(), retention=Window(7)),
        (3, 1),
        (48, 32),
        mask=MaskSpec("chunked", 8),
    ),
    "kivi": Case(
        CacheLayout(per_channel(4, 8, 16, sinks=3), with_residual(uint(2, 8), 7)),
        (2, 1),
        chunks=(13, *ONES[:6]),
    ),
    "residuals": Case(
        CacheLayout(with_residual(mxfp4(), 5, 2), with_hadamard(with_residual(int8(), 6))),
        (4, 1),
        (32, 24),
        chunks=ONES,
    ),
    "latent": Case(CacheLayout(with_hadamard(int8()), InKeys(16)), (16, 1), (48, 16), chunks=ONES),
    "before RoPE": Case(
        CacheLayout(int8(), int8(), before_rope=True),
        (2, 1),
        rotary=RotaryForm("half", 0, 8),
        score=ScoreSpec(bias=BiasSpec("table")),
        chunks=ONES,
    ),
    "turned before RoPE": Case(
        CacheLayout(with_hadamard(with_residual(uint(4, 8), 5)), with_hadamard(int8()), before_rope=True),
        (2, 1),
        (24, 16),
        rotary=RotaryForm("half", 0, 16),
        chunks=ONES,
    ),
    "turned latent before RoPE": Case(
        CacheLayout(with_hadamard(int8()), InKeys(16), before_rope=True),
        (4, 1),
        (48, 16),
        rotary=RotaryForm("half", 16, 32),
        chunks=ONES,
    ),
    "expression": Case(
        CacheLayout(int8(), int8(), Paged(8)),
        (4, 2),
        score=ALL,
        carried=carried_scores.stacked(),
        chunks=ONES,
    ),
    "H2O": Case(
        CacheLayout(int8(), int8(), Slots(), replace(H2O, heavy=5)), (4, 2), score=SINKS, chunks=ONES
    ),
    "H2O in cache": Case(
        CacheLayout(placement=Paged(8), retention=replace(H2O, positions="in_cache", score="mean_age")),
        (3, 1),
        rotary=RotaryForm("half", 0, 16),
        chunks=ONES,
    ),
    "TOVA": Case(
        CacheLayout(placement=Slots(), retention=Scored(0, 5, 2, "tova", "last", "max", "layer")),
        (4, 2),
        chunks=ONES,
    ),
    "SnapKV": Case(
        CacheLayout(placement=Slots(), retention=Scored(2, 3, 4, "snapkv", "vote", "mean", rows=4)),
        (2, 2),
        chunks=(9, 1, 1),
    ),
    "Quest": Case(CacheLayout(int8(), int8(), selection=TopPages(4, 2)), (4, 2), chunks=(13, 1, 1)),
}


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


# What has more than one of the others, each of which is quick.
SLOW = ("turned latent before RoPE", "turned before RoPE", "two pieces", "H2O in cache")


@pytest.mark.optimized
@pytest.mark.few(2)
@pytest.mark.parametrize("name", cases(CASES, CASES.keys() - {*SLOW}))
def test_sites_of_every_kind(name: str) -> None:
    check(CASES[name], "cpp")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 150))])
def test_any_site(seed: int) -> None:
    chance = random.Random(seed)
    check(case_of(lambda options: chance.choice(list(options)), seed % 3 == 0, "cpp"), "cpp")


@pytest.mark.parametrize("isa", [isa.name for isa in available()])
@pytest.mark.parametrize(
    # In the model's other dtype; prompts in float32 are below.
    "name",
    cases(("half", "residuals", "pages by turns"), ("half",)),
)
def test_every_instruction_set_of_this_machine(isa: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, isa)
    ops.forget()  # kernels that were loaded for another are loaded again
    asked = []
    loaded = source.address_of
    monkeypatch.setattr(source, "address_of", lambda spec: asked.append(spec) or loaded(spec))
    check(CASES[name], "cpp")
    assert asked and source.kernel(CppSpec.from_json(asked[0])).isa.name == isa
    ops.forget()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("isa", "dtype", "wide"),
    cases(
        [
            (isa.name, dtype, wide)
            for isa in available()
            for dtype, wide in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
        ],
        # bfloat16 where it has instructions of its own, as pairs and as floats, and where nothing is the processor's
        [
            *((isa.name, torch.float32, False) for isa in available()),
            *(("avx512_bf16", torch.bfloat16, wide) for wide in (False, True)),
            ("portable", torch.bfloat16, False),
        ],
    ),
    ids=str,
)
def test_prompts_by_every_instruction_set(
    isa: str, dtype: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of more channels than vectors have, and not a multiple of them."""
    monkeypatch.setattr(prefill, "widens", lambda dtype, own: wide)
    prefill._with_text.cache_clear()
    monkeypatch.setenv(VARIABLE, isa)
    ops.forget()
    check(Case(CacheLayout(), (3, 1), (72, 40), dtype, chunks=(70, 20), pads=(0, 9)), "cpp")
    ops.forget()
    prefill._with_text.cache_clear()


DTYPES = [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float16))]
# What is written for processors that multiply pairs of bfloat16, in plain C++: it runs on the others.
PAIRS = Isa("pairs", frozenset(), ("-DKV_PAIRS",), "vec_portable.h")


@pytest.mark.parametrize(
    "dims", [(16, 16), pytest.param((24, 40), marks=pytest.mark.slow), (13, 10)], ids=str
)
def test_pairs_of_bfloat16(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of queries and keys that are whole and that are not, several of each."""
    monkeypatch.setattr(source, "isa", lambda: PAIRS)
    ops.forget()
    check(Case(CacheLayout(), (6, 2), dims, torch.bfloat16, chunks=(150, 20)), "cpp")
    ops.forget()


# What is written for processors that multiply quads of bytes, in plain C++, likewise.
QUADS = Isa("quads", frozenset(), ("-DKV_PAIRS", "-DKV_QUADS=8"), "vec_portable.h")
OVER_A_BLOCK = (66, 1, 1, 1)
# Codes that are multiplied as whole numbers, rows of bfloat16 in pairs: channels in whole steps, and what is near.
WHOLE = {
    "int8": Case(CacheLayout(int8(), int8()), (6, 2), (64, 96), chunks=OVER_A_BLOCK),
    "int4": Case(CacheLayout(uint(4, 32), uint(4, 32)), (5, 1), (64, 64), chunks=OVER_A_BLOCK),
    "int4 of 4 spans": Case(CacheLayout(uint(4, 32), uint(4, 32)), (5, 1), (128, 64), chunks=OVER_A_BLOCK),
    "int4 of 8 channels": Case(CacheLayout(uint(4, 8), uint(4, 8)), (3, 1), (16, 16), chunks=OVER_A_BLOCK),
    "int4, one scale": Case(CacheLayout(uint(4), uint(4)), (1, 1), (64, 128), chunks=OVER_A_BLOCK),
    "int4 of 3 spans": Case(CacheLayout(uint(4, 64), uint(4, 32)), (4, 2), (192, 192), chunks=OVER_A_BLOCK),
    "pages": Case(CacheLayout(int8(), uint(4, 32), Paged(16)), (4, 2), (32, 64), chunks=OVER_A_BLOCK),
    "pages of 24": Case(CacheLayout(uint(4, 32), int8(), Paged(24)), (3, 1), (64, 32), chunks=OVER_A_BLOCK),
    "ring": Case(CacheLayout(int8(), int8(), Ring(), SinkWindow(3, 6)), (2, 1), (32, 32), chunks=ONES),
    "residuals": Case(
        CacheLayout(with_residual(uint(4, 32), 7), with_residual(int8(), 5, 2)),
        (4, 2),
        (64, 64),
        chunks=ONES,
    ),
    "turned": Case(
        CacheLayout(with_hadamard(int8()), with_hadamard(uint(4, 32))), (3, 1), (64, 64), chunks=OVER_A_BLOCK
    ),
    "latent": Case(CacheLayout(int8(), InKeys(64)), (16, 1), (96, 64), chunks=ONES),
    "in the model's": Case(CacheLayout(), (6, 2), (64, 96), chunks=OVER_A_BLOCK),
    "in the model's, pages": Case(CacheLayout(placement=Paged(16)), (5, 1), (32, 64), chunks=OVER_A_BLOCK),
    "H2O": Case(CacheLayout(int8(), int8(), Slots(), H2O), (4, 2), (32, 32), chunks=ONES),
    "H2O of blocks": Case(
        CacheLayout(int8(), int8(), Slots(), replace(H2O, heavy=120)),
        (4, 2),
        (32, 32),
        chunks=(60, *[1] * 90),
    ),
}


QUICK = {
    ("int4", "best"),
    ("int4 of 8 channels", "quads"),
    ("residuals", "best"),
    ("pages", "quads"),
    ("int4 of 3 spans", "quads"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "isa"),
    [
        pytest.param(name, isa, marks=() if (name, isa) in QUICK else pytest.mark.slow)
        for name in WHOLE
        for isa in ("best", "quads")
    ],
)
def test_whole_numbers_and_pairs(
    name: str, isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the instructions of this machine, and by the same in plain C++."""
    monkeypatch.setattr(attention, "widens", lambda dtype: False)
    if isa == "quads":
        monkeypatch.setattr(source, "isa", lambda: QUADS)
    ops.forget()
    check(replace(WHOLE[name], dtype=dtype), "cpp")
    ops.forget()


@pytest.mark.parametrize(
    ("name", "isa"),
    [
        ("in the model's", "quads"),
        ("in the model's, pages", "best"),
        pytest.param("in the model's", "best", marks=pytest.mark.slow),
        pytest.param("in the model's, pages", "quads", marks=pytest.mark.slow),
    ],
)
def test_pairs_become_floats(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where floats are multiplied faster: each channel of a pair is in its place."""
    monkeypatch.setattr(attention, "widens", lambda dtype: True)
    if isa == "quads":
        monkeypatch.setattr(source, "isa", lambda: QUADS)
    ops.forget()
    check(replace(WHOLE[name], dtype=torch.bfloat16), "cpp")
    ops.forget()


class Outliers(Case):
    """Some channels of queries, and others of keys, are a hundred times the rest; and one key is met by all."""

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().qkv()
        q, k, v = q.clone(), k.clone(), v.clone()
        q[..., 3], k[..., 5] = 100 * q[..., 3], 100 * k[..., 5]
        k[..., 3] = k[..., 3] / 100
        k[:, :, 0] = 3 * k[:, :, 0].abs()
        return q, k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "layout", [CacheLayout(int8(), int8()), CacheLayout(uint(4, 32), uint(4, 32))], ids=str
)
def test_channels_that_stand_out(layout: CacheLayout, dtype: torch.dtype) -> None:
    """A query's whole numbers are as wide as its largest channel wants: the others must keep enough."""
    check(Outliers(layout, (3, 1), (64, 64), dtype, chunks=(66, 1, 1)), "cpp")


# Several blocks of queries and keys, whole and not.
LONG_PROMPT, PADS = (140, 1, 130), (0, 70)
PROMPTS = {
    "plain prompt": Case(CacheLayout(int8(), int8(), Paged(16)), (4, 2), chunks=LONG_PROMPT, pads=PADS),
    "window prompt": Case(
        CacheLayout(), (4, 2), mask=MaskSpec("sliding", 100), chunks=LONG_PROMPT, pads=PADS
    ),
    "ring prompt": Case(
        CacheLayout(placement=Ring(), retention=SinkWindow(3, 90)), (4, 2), chunks=LONG_PROMPT, pads=PADS
    ),
    "residual prompt": Case(
        CacheLayout(with_residual(uint(2, 8), 40), int8()),
        (4, 2),
        mask=MaskSpec("chunked", 64),
        chunks=LONG_PROMPT,
        pads=PADS,
    ),
    "capped prompt": Case(
        CacheLayout(), (4, 2), score=ScoreSpec(4.0, BiasSpec("alibi"), True), chunks=LONG_PROMPT, pads=PADS
    ),
    "in-cache prompt": Case(
        CacheLayout(placement=Ring(), retention=SinkWindow(3, 90, "in_cache"), before_rope=True),
        (4, 2),
        rotary=RotaryForm("half", 0, 16),
        score=ScoreSpec(bias=BiasSpec("alibi")),
        chunks=LONG_PROMPT,
        pads=PADS,
    ),
    "H2O prompt": Case(
        CacheLayout(int8(), int8(), Slots(), Scored(2, 60, 20)),
        (4, 2),
        score=ALL,
        chunks=LONG_PROMPT,
        pads=PADS,
    ),
    "H2O residual prompt": Case(
        CacheLayout(with_residual(int8(), 40), with_residual(int8(), 25), Slots(), Scored(2, 60, 45)),
        (4, 2),
        chunks=LONG_PROMPT,
        pads=PADS,
    ),
    "H2O in-cache prompt": Case(
        CacheLayout(
            values=with_residual(int8(), 30),
            placement=Slots(),
            retention=Scored(2, 60, 33, positions="in_cache"),
            before_rope=True,
        ),
        (4, 2),
        rotary=RotaryForm("half", 0, 16),
        score=ScoreSpec(bias=BiasSpec("alibi")),
        carried=carried_scores.hinge(),
        chunks=LONG_PROMPT,
        pads=PADS,
    ),
    "SnapKV prompt": Case(
        CacheLayout(
            placement=Slots(),
            retention=Scored(2, 60, 20, "snapkv", "vote", "max", "layer", rows=30, smooth=3),
        ),
        (6, 2),
        chunks=LONG_PROMPT,
        pads=PADS,
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "name",  # those that are slow have nothing that no other has
    cases(
        PROMPTS, PROMPTS.keys() - {"window prompt", "in-cache prompt", "H2O prompt", "H2O residual prompt"}
    ),
)
def test_prompts_in_several_blocks(name: str, dtype: torch.dtype) -> None:
    """Blocks that are seen whole, in part and not at all; any number of threads gives the same bits."""
    case = replace(PROMPTS[name], dtype=dtype)
    check(case, "cpp")
    found = []
    for threads in (1, 5):
        torch.set_num_threads(threads)
        found.append(ran(case, "cpp").out)
    assert torch.equal(*found)


LONG = (300, 1, 1)  # several pieces, of several blocks


@pytest.mark.parametrize("layout", [CacheLayout(), CacheLayout(int8(), uint(4, 16), Paged(16))], ids=str)
def test_slots_in_several_pieces(layout: CacheLayout) -> None:
    """More slots than a piece has, of sequences of other lengths; any number of threads gives the same bits."""
    case = Case(layout, (3, 1), (32, 32), chunks=LONG, pads=(0, 170, 299))
    outs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outs.append(ran(case, "cpp").out[:, :, -2:])
    wanted = oracle(case, [])[0][:, :, -2:]
    there = real(case)[:, :, -2:]
    assert float((outs[0].double() - wanted).masked_fill(~there, 0).abs().max()) < 2e-5
    for out in outs[1:]:
        assert float((out - outs[0]).masked_fill(~there, 0).abs().max()) < 2e-6


def test_padding_gives_zeros_and_writes_nothing() -> None:
    case = Case(CacheLayout(), (2, 1), chunks=(1, 1, 1), pads=(0, 3))
    got = ran(case, "cpp")
    assert not got.out[1].any() and got.buffers[0][1].isnan().all()


SIZES = {
    "least": Case(CacheLayout(), (1, 1), (4, 4), chunks=(1, 1, 1)),
    "group": Case(CacheLayout(), (20, 1), (16, 16), chunks=(1, 1, 1)),
    "wide": Case(CacheLayout(), (2, 1), (576, 512), chunks=(1, 1, 1)),
    "odd": Case(CacheLayout(), (5, 5), (20, 36), chunks=(1, 1, 1)),
    "empty": Case(CacheLayout(), (3, 1), (13, 13), chunks=(1, 1), pads=(0, 2, 1)),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    check(SIZES[name], "cpp")


@pytest.mark.few(2)
@pytest.mark.parametrize("isa", [isa.name for isa in available()])
@pytest.mark.parametrize("score", [ScoreSpec(), ScoreSpec(4.0, None, True)], ids=["plain", "capped, sinks"])
def test_what_is_no_number_is_told(isa: str, score: ScoreSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the reference does: one key that is no number spoils what sees it, and so does a query."""
    monkeypatch.setenv(VARIABLE, isa)
    ops.forget()
    site = SiteSpec(CacheLayout(), 0.25, score=score)
    sinks = torch.ones(2) if score.sinks else None
    for where in ("q", "k", "v"):
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, 1, 16, generator=g) for heads in (2, 1, 1))
        {"q": q, "k": k, "v": v}[where][0, 0, 0, 3] = float("nan")
        outs = []
        for kernels in ("cpp", "reference"):
            buffers = [torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
            text = replace(site, kernels=kernels).to_json()
            at = torch.tensor([[5]])
            outs.append(op.cached_attention(q, k, v, buffers, at, at[0], [], 6, text, sinks=sinks))
        assert torch.equal(outs[0].isnan(), outs[1].isnan()) and outs[0].isnan().any(), where
    ops.forget()


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_codes_of_what_is_no_number_are_told(where: str) -> None:
    """Their scale is none: as the reference does, all that sees them becomes none."""
    layout = CacheLayout(int8(), int8())
    g = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(1, heads, 1, 64, generator=g) for name, heads in (("q", 2), ("k", 1), ("v", 1))
    }
    given[where][0, 0, 0, 3] = float("nan")
    outs = []
    for kernels in ("cpp", "reference"):
        specs = layout.buffers(1, 64, 64, torch.float32, 8)
        buffers = [torch.zeros(1, *spec.shape, dtype=spec.dtype) for spec in specs]
        text = SiteSpec(layout, 0.125, kernels=kernels).to_json()
        at = torch.tensor([[0]])
        outs.append(op.cached_attention(*given.values(), buffers, at, at[0], [], 1, text))
    assert torch.equal(outs[0].isnan(), outs[1].isnan()) and outs[0].isnan().any()
