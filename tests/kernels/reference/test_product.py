"""The whole product: storage x placement x retention x mask x scores, against a dictionary of tokens in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    Window,
    float_dtype,
    fp8,
    int8,
    model_dtype,
    mxfp4,
    nf4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from tests.support import dictionary
from tests.support.policy import scored_attention
from tests.support.runner import run

HQ, HKV, D, DV, T = 4, 2, 32, 32, 36
STORAGES: tuple[Any, ...] = (
    model_dtype(),
    float_dtype("float16"),
    fp8(),
    fp8("e5m2", "none"),
    fp8("e4m3", "head"),
    int8(),
    nf4(32),
    mxfp4(),
    with_hadamard(with_residual(nf4(), 4, 2)),
    uint(4),
    uint(8),
    uint(4, 32),
    uint(3, 32),
    uint(2, 32),
    with_hadamard(int8()),
    with_hadamard(uint(4, 32)),
    with_residual(int8(), 3),
    with_residual(uint(2, 32), 0, sinks=2),
    with_residual(fp8(), 4, sinks=1),
    with_hadamard(with_residual(uint(4, 32), 5)),
    per_channel(4, 4, 8),
    per_channel(2, 8, 8),
    with_hadamard(per_channel(3, 4, 4)),
)
POSITIONS = st.sampled_from(("original", "in_cache"))
RETENTIONS = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(2, 20)),
    st.builds(SinkWindow, st.integers(0, 5), st.integers(2, 16), POSITIONS),
    st.builds(
        Scored,
        st.integers(0, 4),
        st.integers(0, 8),
        st.integers(1, 8),
        score=st.sampled_from(("sum", "mean_age", "last", "vote")),
        pooling=st.sampled_from(("sum", "mean", "max")),
        granularity=st.sampled_from(("kv_head", "layer")),
        rows=st.sampled_from((0, 1, 3)),
        smooth=st.sampled_from((1, 3, 5)),
        positions=POSITIONS,
    ),
)
PLACEMENTS = st.one_of(
    st.sampled_from((Contiguous(), Ring(), Slots())),
    st.builds(Paged, st.integers(8, 20)),
    st.just(Paged(16)),
    st.builds(Paged, st.integers(8, 20), released=st.just(True)),
)
MASKS = st.sampled_from(
    (MaskSpec("causal"), MaskSpec("causal"), MaskSpec("sliding", 7), MaskSpec("chunked", 9))
)
SCORES = st.sampled_from(
    (
        ScoreSpec(),
        ScoreSpec(softcap=4.0, sinks=True),
        ScoreSpec(bias=BiasSpec("alibi")),
        ScoreSpec(bias=BiasSpec("relative", T), sinks=True),
    )
)
ANGLES = torch.arange(4 * T, dtype=torch.float64)[:, None] * 10000 ** (-torch.arange(0, D, 2) / D)
ROPE = [torch.cat([f(ANGLES)] * 2, -1).float() for f in (torch.cos, torch.sin)]
FORM = RotaryForm("half", 0, D)
# Both sides round a stored vector to the same bits, so what remains is the op's arithmetic in float32, where the oracle
# has float64 (the one by scores: another order): sums of D products and of T weights. Results are means of values, so
# that is a few units in the last place of the largest: 2.4 at most in 3,000 cases of this strategy.
EPS, WITHIN = torch.finfo(torch.float32).eps, 16


@st.composite
def cases(draw: st.DrawFn) -> tuple[SiteSpec, list[int], int]:
    """A layout that makes sense, what surrounds it, and how the tokens come."""
    retention, placement = draw(RETENTIONS), draw(PLACEMENTS)
    layout = CacheLayout(
        draw(st.sampled_from(STORAGES)),
        draw(st.sampled_from(STORAGES)),
        placement,
        retention,
        draw(st.booleans()),
    )
    assume(layout.check() is None)
    mask = MaskSpec("causal") if isinstance(retention, Scored) or retention.in_cache else draw(MASKS)
    form = FORM if layout.rotates_on_read else None
    chunks = draw(st.lists(st.sampled_from((1, 1, 1, 2, 5, 9, 14)), min_size=1, max_size=12))
    assume(sum(chunks) <= T)
    return SiteSpec(layout, D**-0.5, mask, draw(SCORES), form), chunks, draw(st.integers(0, 6))


@settings(max_examples=160, deadline=None)
@given(case=cases(), seed=st.integers(0, 10**6))
def test_equals_a_dictionary_of_tokens(case: tuple[SiteSpec, list[int], int], seed: int) -> None:
    spec, chunks, pad = case
    layout, total, g = spec.layout, sum(chunks), torch.Generator().manual_seed(seed)
    qkv = [torch.randn(2, h, total, d, generator=g) for h, d in ((HQ, D), (HKV, D), (HKV, DV))]
    pads = torch.tensor([0, min(pad, total - 1)])
    extra: dict[str, Any] = {"sinks": torch.randn(HQ, generator=g)} if spec.score.sinks else {}
    if spec.score.bias is not None:
        shape = (HQ,) if spec.score.bias.kind == "alibi" else (HQ, T)
        extra["bias"] = torch.randn(shape, generator=g).abs()
    calibrated = {
        f"{side}.scale": torch.rand(HKV, generator=g) * 0.01 + 0.005
        for side, storage in (("keys", layout.keys), ("values", layout.values))
        if storage.calibration is not None
    }
    rope = ROPE if layout.rotates_on_read else []
    ran = run(spec, qkv, chunks, pads, rope, scales=calibrated, **extra)
    got = ran.out
    scales = (calibrated.get("keys.scale"), calibrated.get("values.scale"))
    if isinstance(layout.retention, Scored):
        sinks, bias = extra.get("sinks"), extra.get("bias")
        wanted, choices = scored_attention(
            *qkv, spec, rope, chunks, pads, sinks, bias, ran.held, scales=scales
        )
        # Two scores that rounding may confuse differ by what the probabilities in them do.
        assert all(choice.excess <= 4 * WITHIN * EPS * choice.values.abs().max() for choice in choices)
    else:
        turn = (lambda x, place: turned(x, place)) if rope else None
        rows = []
        for row, first in enumerate(pads.tolist()):
            own = [x[row, :, first:] for x in qkv]
            out = dictionary.attend(spec, *own, turn, extra.get("sinks"), extra.get("bias"), scales)
            rows.append(torch.cat([out.new_zeros(HQ, first, DV), out], 1))
        wanted = torch.stack(rows)
    real = (torch.arange(total) >= pads[:, None])[:, None, :, None].expand_as(got)
    error = (got[real].double() - wanted[real].double()).abs().max()
    assert error <= WITHIN * EPS * qkv[2].abs().max()


def turned(x: Tensor, place: int) -> Tensor:
    cos, sin = (table[place].double() for table in ROPE)
    a, b = x.chunk(2)
    return x * cos + torch.cat([-b, a]) * sin


def test_the_oracle_turns_as_rope_does() -> None:
    x = torch.randn(1, 1, 1, D)
    got = rotate(x, torch.tensor([[5]]), *ROPE, form=FORM)[0, 0, 0]
    torch.testing.assert_close(turned(x[0, 0, 0].double(), 5).float(), got)


def test_every_kind_is_drawn() -> None:
    """The strategy reaches every combination that is not refused."""
    placements = (Contiguous(), Ring(), Slots(), Paged(16), Paged(16, released=True))
    retentions = (Full(), Window(9), SinkWindow(2, 9), Scored(2, 3, 4))
    allowed = [
        CacheLayout(s, s, p, r).check() is None for s in STORAGES for p in placements for r in retentions
    ]
    assert sum(allowed) > len(STORAGES) * 6
    assert replace(Scored(1, 2, 3), heavy=0).tokens == 4
