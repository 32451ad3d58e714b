"""The cached reference against the oracle of the policy, over the whole product of layouts."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    Ring,
    SinkWindow,
    Window,
    float_dtype,
    fp8,
    int8,
    model_dtype,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import BiasSpec, MaskSpec, ScoreSpec
from tests.support.policy import policy_attention
from tests.support.runner import run

STORAGES = [
    model_dtype(),
    float_dtype("bfloat16"),
    fp8(),
    fp8("e5m2", "none"),
    int8(),
    uint(4),
    uint(4, 32),
    uint(8),
    with_hadamard(uint(3, 32)),
]
RESIDUAL = [
    per_channel(2, 4, 8),
    per_channel(3, 5, 5),
    with_residual(uint(2, 32), 6),
    with_hadamard(with_residual(fp8(), 3)),
    with_hadamard(per_channel(4, 3, 9)),
]
PLACED = [
    (Contiguous(), Full()),
    (Contiguous(), Window(5)),
    (Ring(), Window(5)),
    (Ring(), Window(1)),
    (Ring(), SinkWindow(3, 6)),
    (Ring(), SinkWindow(0, 6)),
    (Contiguous(), SinkWindow(3, 6)),
    (Ring(), SinkWindow(3, 6, "in_cache")),
    (Contiguous(), SinkWindow(3, 6, "in_cache")),
    (Ring(), SinkWindow(2, 1, "in_cache")),
]
HQ, HKV, D, DV, T = 4, 2, 64, 32, 40


def rope_tables(count: int, dim: int = D) -> list[torch.Tensor]:
    angles = torch.arange(count)[:, None] * 10000 ** (-torch.arange(0, dim, 2) / dim)
    return [torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin)]


def score_tensors(spec: SiteSpec) -> dict[str, torch.Tensor]:
    """Random sinks and biases of the spec's form, one per query head."""
    g = torch.Generator().manual_seed(7)
    found = {"sinks": torch.randn(HQ, generator=g)} if spec.score.sinks else {}
    if spec.score.bias is not None:
        shape = {"alibi": (HQ,), "relative": (HQ, T), "columns": (HQ, T), "table": (HQ, T, T)}
        found["bias"] = torch.randn(shape[spec.score.bias.kind], generator=g)
    return found


def run_cached(
    spec: SiteSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunks: list[int],
    padding: torch.Tensor,
) -> torch.Tensor:
    rope = rope_tables(64) if spec.layout.retention.in_cache else []
    return run(spec, (q, k, v), chunks, padding, rope, every=8, **score_tensors(spec)).out


def budget(
    spec: SiteSpec, args: list[torch.Tensor], padding: torch.Tensor, oracle: torch.Tensor
) -> torch.Tensor:
    """Twice the error of the same computation in this dtype against float64, plus rounding (per element)."""
    exact = policy_attention(
        *[a.double() for a in args],
        spec,
        [t.double() for t in rope_tables(64)],
        padding,
        **score_tensors(spec),
    )
    # The quantized grids differ between dtypes where a value sits on an edge: rounding is compared in-dtype only.
    eps = torch.finfo(oracle.dtype).eps
    own = (oracle.double() - exact).abs().max() if spec.layout.keys == model_dtype() else 0.0
    return 2 * own + 64 * eps * args[2].abs().max().double()


def check(spec: SiteSpec, chunks: list[int], padding: list[int], seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    total, batch = sum(chunks), len(padding)
    q = torch.randn(batch, HQ, total, D, generator=g)
    k = torch.randn(batch, HKV, total, D, generator=g)
    v = torch.randn(batch, HKV, total, DV, generator=g)
    pads = torch.tensor(padding)
    rope = rope_tables(64) if spec.layout.retention.in_cache else []
    oracle = policy_attention(q, k, v, spec, rope, pads, **score_tensors(spec))
    got = run_cached(spec, q, k, v, chunks, pads)
    assert got.isfinite().all()
    real = torch.arange(total)[None] >= pads[:, None]
    error = (got - oracle).abs()[real[:, None, :, None].expand_as(got)].max()
    assert error <= budget(spec, [q, k, v], pads, oracle)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "storage", [model_dtype(), fp8(), int8(), uint(4, 32), with_hadamard(uint(3, 32))], ids=str
)
@pytest.mark.parametrize("placed", PLACED, ids=lambda p: f"{p[0]}-{p[1]}")
def test_any_chunks_equal_the_policy(storage, placed) -> None:
    spec = SiteSpec(CacheLayout(storage, storage, *placed), D**-0.5)
    for chunks in ([T], [7] * 5 + [5], [1] * T, [13, 1, 1, 20, 1, 4], [2, 38]):
        check(spec, chunks, [0])
        check(spec, chunks, [0, 9, 3])


@pytest.mark.few(2)
@pytest.mark.parametrize("values", [model_dtype(), int8(), *RESIDUAL[1:4]], ids=str)
@pytest.mark.parametrize("keys", RESIDUAL, ids=str)
def test_tokens_settle_alike_in_any_chunks(keys, values) -> None:
    """Keys and values settle at different tokens; a prompt sees both forms of one that settles within it."""
    for layout in (CacheLayout(keys, values), CacheLayout(values, keys)):
        for chunks in ([T], [7] * 5 + [5], [13, 1, 1, 20, 1, 4], [1] * 20):
            check(SiteSpec(layout, D**-0.5), chunks, [0, 9])


@pytest.mark.parametrize("placed", [p for p in PLACED if p[0] == Contiguous()], ids=lambda p: str(p[1]))
def test_tokens_settle_in_every_contiguous_layout(placed) -> None:
    scores = (ScoreSpec(), ScoreSpec(2.0, BiasSpec("alibi"), True))
    for score, mask in itertools.product(scores, (MaskSpec("causal"), MaskSpec("sliding", 12))):
        if mask.window and placed[1].in_cache:
            continue  # a place in the cache under a sliding mask depends on both windows
        layout = CacheLayout(RESIDUAL[4], RESIDUAL[2], *placed)
        check(SiteSpec(layout, D**-0.5, mask, score), [13, 1, 1, 20, 1, 4], [0, 9])


@pytest.mark.parametrize("placed", PLACED, ids=lambda p: f"{p[0]}-{p[1]}")
def test_a_sliding_mask_holds_too(placed) -> None:
    for mask in (MaskSpec("sliding", 4), MaskSpec("chunked", 4)):
        spec = SiteSpec(CacheLayout(int8(), model_dtype(), *placed), 0.3, mask)
        if placed[1].in_cache:
            pytest.skip("a place in the cache under a sliding mask depends on both windows")
        check(spec, [11, 1, 1, 9], [2, 0])


SCORES = [
    ScoreSpec(softcap=3.0),
    ScoreSpec(sinks=True),
    ScoreSpec(bias=BiasSpec("alibi")),
    ScoreSpec(bias=BiasSpec("relative", T)),
    ScoreSpec(bias=BiasSpec("columns", T)),
    ScoreSpec(bias=BiasSpec("table", T)),
    ScoreSpec(2.0, BiasSpec("alibi"), True),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("placed", PLACED, ids=lambda p: f"{p[0]}-{p[1]}")
def test_scores_hold_in_every_layout(placed, score) -> None:
    if placed[1].in_cache and score.bias and score.bias.kind in ("columns", "table"):
        pytest.skip("a bias by positions in the sequence has no places in a cache; the plan refuses it")
    spec = SiteSpec(CacheLayout(model_dtype(), model_dtype(), *placed), D**-0.5, score=score)
    for chunks in ([13, 1, 1, 20, 1, 4], [T], [1] * 20):
        check(spec, chunks, [0, 9])


@settings(max_examples=60, deadline=None)
@given(
    keys=st.sampled_from([*STORAGES, *RESIDUAL]),
    values=st.sampled_from([*STORAGES[:6], *RESIDUAL[:3]]),
    sinks=st.integers(0, 5),
    window=st.integers(1, 9),
    positions=st.sampled_from(["original", "in_cache"]),
    placement=st.sampled_from([Ring(), Contiguous()]),
    chunks=st.lists(st.integers(1, 17), min_size=1, max_size=6),
    padding=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_any_with_any(keys, values, sinks, window, positions, placement, chunks, padding, seed) -> None:
    if keys.residual or values.residual:
        placement = Contiguous()
    layout = CacheLayout(keys, values, placement, SinkWindow(sinks, window, positions))
    assert layout.check() is None
    padding = [min(pad, sum(chunks) - 1) for pad in padding]
    if sum(chunks) > 50:
        chunks = chunks[:2]
        padding = [min(pad, sum(chunks) - 1) for pad in padding]
    check(SiteSpec(layout, D**-0.5), chunks, padding, seed)


def test_budget_of_the_whole_length_is_the_full_cache() -> None:
    g = torch.Generator().manual_seed(1)
    args = [torch.randn(1, h, T, d, generator=g) for h, d in ((HQ, D), (HKV, D), (HKV, DV))]
    pads = torch.zeros(1, dtype=torch.long)
    outs = [
        run_cached(SiteSpec(CacheLayout(placement=p, retention=r), 0.125), *args, [9] * 4 + [4], pads)
        for p, r in ((Contiguous(), Full()), (Ring(), Window(T)), (Ring(), SinkWindow(4, T - 4)))
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=64 * torch.finfo(torch.float32).eps * 4)


def test_layout_text_round_trips() -> None:
    for storage, placed in itertools.product([*STORAGES, *RESIDUAL], PLACED):
        for score in SCORES:
            spec = SiteSpec(CacheLayout(storage, model_dtype(), *placed), 0.25, MaskSpec("sliding", 9), score)
            assert SiteSpec.from_json(spec.to_json()) == spec
