"""Retention by scores (H2O, TOVA, SnapKV): the cached op against a dictionary of tokens per head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvcompile
from kvcompile.kernels.reference import score_sums
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    InKeys,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    float_dtype,
    fp8,
    int8,
    model_dtype,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import BiasSpec, RotaryForm, ScoreSpec
from tests.kernels.reference.test_attention import HKV, HQ, D, T, rope_tables, score_tensors
from tests.support.models import tiny_hf
from tests.support.policy import policy_attention, scored_attention
from tests.support.runner import run

STORAGES = (
    model_dtype(),
    float_dtype("bfloat16"),
    fp8(),
    int8(),
    uint(4, 32),
    with_hadamard(uint(4, 32)),
    with_residual(int8(), 3),
    with_residual(uint(2, 32), 6),
    with_hadamard(with_residual(fp8(), 2)),
    with_residual(fp8(), 0, sinks=1),
    with_residual(uint(4), 2, sinks=1),
)
H2O = Scored(1, 3, 2)
TOVA = Scored(0, 5, 1, "tova", "last", "mean", "layer")
SNAP = Scored(0, 3, 4, "snapkv", "vote", "mean", "kv_head", rows=3, smooth=3)
RETENTIONS = (
    H2O,
    replace(H2O, score="mean_age", pooling="max"),
    replace(H2O, pooling="sum", granularity="layer", rows=2),
    replace(H2O, positions="in_cache"),
    TOVA,
    replace(TOVA, positions="in_cache"),
    SNAP,
    replace(SNAP, sinks=2, smooth=5, pooling="max"),
)
SCORES = (
    ScoreSpec(),
    ScoreSpec(softcap=3.0, sinks=True),
    ScoreSpec(bias=BiasSpec("alibi")),
    ScoreSpec(bias=BiasSpec("relative", T)),
    ScoreSpec(bias=BiasSpec("table", T)),
)
ROPE = rope_tables(4 * T)
HEADS = RotaryForm("half", 0, D)
CHUNKS = st.lists(st.sampled_from((1, 1, 1, 2, 3, 7, 12)), min_size=1, max_size=14).filter(
    lambda sizes: sum(sizes) <= T
)


def inputs(seed: int, tokens: int, batch: int = 2, v_dim: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    # Large scores: few tokens get most of the probability, and others come back into view.
    q, k = (2 * torch.randn(batch, h, tokens, D, generator=g) for h in (HQ, HKV))
    return q, k, torch.randn(batch, HKV, tokens, v_dim, generator=g)


def close(got: Tensor, wanted: Tensor, pads: Tensor, tolerance: float = 2e-4) -> None:
    for row, pad in enumerate(pads.tolist()):
        torch.testing.assert_close(got[row, :, pad:], wanted[row, :, pad:], rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    retention=st.sampled_from(RETENTIONS),
    score=st.sampled_from(SCORES),
    keys=st.sampled_from(STORAGES),
    values=st.sampled_from(STORAGES),
    chunks=CHUNKS,
    pad=st.integers(0, 9),
    seed=st.integers(0, 999),
)
def test_equals_a_dictionary_of_tokens(
    retention: Scored, score: ScoreSpec, keys: Any, values: Any, chunks: list[int], pad: int, seed: int
) -> None:
    """Step by step, in any passes, ragged: what is seen, and what stays."""
    if retention.in_cache and score.bias is not None and score.bias.kind == "table":
        score = ScoreSpec()
    layout = CacheLayout(keys, values, Slots(), retention)
    if layout.check() is not None:  # more sinks in full than the retention keeps
        layout = replace(layout, retention=replace(retention, sinks=1))
    assert layout.check() is None
    spec = SiteSpec(layout, 0.125, score=score, rotary=HEADS if retention.in_cache else None)
    args, tokens = inputs(seed, sum(chunks)), sum(chunks)
    pads = torch.tensor([0, min(pad, tokens - 1)])
    rope = ROPE if retention.in_cache else []
    extra = score_tensors(spec)
    ran = run(spec, args, chunks, pads, rope, **extra)
    # Which of two nearly equal scores goes is the op's to say; that they were nearly equal is checked.
    wanted, choices = scored_attention(
        *args, spec, rope, chunks, pads, extra.get("sinks"), extra.get("bias"), ran.held
    )
    close(ran.out, wanted, pads)
    assert all(choice.excess <= 1e-4 for choice in choices)


@settings(max_examples=15, deadline=None)
@given(retention=st.sampled_from(RETENTIONS), chunks=CHUNKS, seed=st.integers(0, 99))
def test_budget_is_met_exactly(retention: Scored, chunks: list[int], seed: int) -> None:
    """Every head holds min(length, budget) different tokens, sinks and recents among them."""
    spec = SiteSpec(CacheLayout(placement=Slots(), retention=replace(retention, positions="original")), 0.125)
    pads = torch.tensor([0, 2 if sum(chunks) > 2 else 0])
    held = run(spec, inputs(seed, sum(chunks)), chunks, pads).held
    length = 0
    for size, tokens in zip(chunks, held, strict=True):
        length += size
        for row, pad in enumerate(pads.tolist()):
            seen = max(length - pad, 0)
            for head in tokens[row]:
                kept = [t for t in head.tolist() if t >= 0]
                assert len(kept) == len(set(kept)) == min(seen, retention.tokens)
                always = {*range(min(retention.sinks, seen)), *range(max(seen - retention.recent, 0), seen)}
                assert always <= set(kept)


@pytest.mark.parametrize("retention", RETENTIONS, ids=str)
def test_budget_as_long_as_the_text_keeps_all(retention: Scored) -> None:
    spec = SiteSpec(
        CacheLayout(placement=Slots(), retention=replace(retention, heavy=T, positions="original")), 0.125
    )
    full = SiteSpec(CacheLayout(placement=Contiguous(), retention=Full()), 0.125)
    args, pads = inputs(3, T), torch.tensor([0, 4])
    wanted = policy_attention(*args, full, [], pads)
    for chunks in ([T], [11, *[1] * (T - 11)], [7, 12, 1, 1, 12, 7]):
        close(run(spec, args, chunks, pads).out, wanted, pads)


def test_no_heavy_hitters_is_a_sink_window() -> None:
    """And a step that sees `budget` tokens with itself is what a ring of that many slots sees."""
    for positions in ("original", "in_cache"):
        scored = CacheLayout(placement=Slots(), retention=Scored(2, 0, 5, positions=positions))
        ring = CacheLayout(placement=Ring(), retention=SinkWindow(2, 5, positions))
        rope = ROPE if positions == "in_cache" else []
        form = HEADS if rope else None
        args, pads = inputs(5, 30), torch.tensor([0, 3])
        chunks = [7, *[1] * 23]
        wanted = policy_attention(*args, SiteSpec(ring, 0.125, rotary=form), rope, pads)
        close(run(SiteSpec(scored, 0.125, rotary=form), args, chunks, pads, rope).out, wanted, pads)


@settings(max_examples=25, deadline=None)
@given(
    retention=st.sampled_from(RETENTIONS),
    keys=st.sampled_from(STORAGES),
    values=st.sampled_from(STORAGES),
    page_size=st.integers(8, 20),
    chunks=CHUNKS,
    pad=st.integers(0, 5),
)
def test_pages_change_nothing(
    retention: Scored, keys: Any, values: Any, page_size: int, chunks: list[int], pad: int
) -> None:
    retention = replace(retention, heavy=14)  # more than a page
    form, rope = (HEADS, ROPE) if retention.in_cache else (None, [])
    args, pads = inputs(8, sum(chunks)), torch.tensor([0, min(pad, sum(chunks) - 1)])
    placements = (Slots(), Paged(page_size))
    plain, paged = (
        run(SiteSpec(CacheLayout(keys, values, p, retention), 0.125, rotary=form), args, chunks, pads, rope)
        for p in placements
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.held, paged.held, strict=True))
    close(paged.out, plain.out, pads, 0)


def test_of_equal_scores_the_oldest_goes() -> None:
    """Queries that see all tokens alike: what stays are sinks, and the newest."""
    retention = Scored(1, 2, 1)
    spec = SiteSpec(CacheLayout(placement=Slots(), retention=replace(retention, score="last")), 0.125)
    q, k, v = inputs(1, 9)
    for chunks in ([9], [4, 1, 1, 1, 1, 1]):
        held = run(spec, (q * 0, k, v), chunks, torch.tensor([0, 0])).held
        assert sorted(held[-1][0, 0].tolist()) == [0, 6, 7, 8]


@pytest.mark.parametrize(
    "storage",
    (
        model_dtype(),
        int8(),
        with_hadamard(uint(4, 32)),
        with_residual(int8(), 3),
        with_residual(fp8(), 0, sinks=1),
    ),
    ids=str,
)
def test_values_in_the_keys(storage: Any) -> None:
    layout = CacheLayout(storage, InKeys(40), Slots(), H2O)
    spec = SiteSpec(layout, 0.125)
    q, k, _ = inputs(2, 30)
    args = (q, k[:, :1], k[:, :1, :, :40])
    chunks, pads = [9, 1, 1, 6, *[1] * 13], torch.tensor([0, 4])
    ran = run(spec, args, chunks, pads)
    close(ran.out, scored_attention(*args, spec, [], chunks, pads, held=ran.held)[0], pads)


def test_queries_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks only bound the memory: the sums are the same."""
    spec = SiteSpec(CacheLayout(placement=Slots(), retention=replace(H2O, rows=9)), 0.125)
    args, pads = inputs(4, 33), torch.tensor([0, 7])
    whole = run(spec, args, [20, 13], pads)
    monkeypatch.setattr(score_sums, "_ELEMENTS", 500)
    parts = run(spec, args, [20, 13], pads)
    close(parts.out, whole.out, pads, 1e-5)
    kept = zip(whole.held, parts.held, strict=True)
    assert all(torch.equal(a.sort(-1).values, b.sort(-1).values) for a, b in kept)


def test_an_oracle_that_is_told_what_was_kept_checks_it() -> None:
    spec = SiteSpec(CacheLayout(placement=Slots(), retention=H2O), 0.125)
    args, chunks, pads = inputs(6, 16), [9, 1, 1, 5], torch.tensor([0, 0])
    held = run(spec, args, chunks, pads).held
    wrong = [tokens.clone() for tokens in held]
    recent = wrong[0][0, 0] == 8
    wrong[0][0, 0][recent] = next(t for t in range(8) if t not in held[0][0, 0].tolist())
    with pytest.raises(ValueError, match="only those of"):
        scored_attention(*args, spec, [], chunks, pads, held=wrong)
    # The heavy hitter that matters most for the one that matters least: seen in the scores.
    _, choices = scored_attention(*args, spec, [], chunks, pads, held=held)
    assert max(choice.excess for choice in choices) <= 1e-5
    swapped = [tokens.clone() for tokens in held[:1]]
    gone = next(t for t in range(1, 7) if t not in held[0][0, 0].tolist())
    heavy = max(t for t in held[0][0, 0].tolist() if 1 <= t < 7)
    swapped[0][0, 0][swapped[0][0, 0] == heavy] = gone
    _, choices = scored_attention(*(x[:, :, :9] for x in args), spec, [], [9], pads, held=swapped)
    assert max(choice.excess for choice in choices) > 1e-3


H2O_IN_CACHE = {
    "kind": "h2o",
    "heavy": 9,
    "recent": 6,
    "score": "mean_age",
    "prefill": "bounded",
    "positions": "in_cache",
}
SNAPKV = {"kind": "snapkv", "heavy": 9, "recent": 6, "rows": 4}


@pytest.mark.parametrize(
    "layers", [(H2O_IN_CACHE,), pytest.param((H2O_IN_CACHE, SNAPKV), marks=pytest.mark.slow)]
)
def test_compiled(layers: tuple[dict[str, Any], ...]) -> None:
    """Inductor's program of a layer of each kind keeps what the oracle does, in any number of tokens."""
    recipe = {
        "cache": {"keys": {"dtype": "int8"}},
        "layers": [{"where": {"index": n}, "cache": {"retention": kind}} for n, kind in enumerate(layers)],
    }
    fast = kvcompile.optimize(tiny_hf("llama", layers=len(layers)), recipe, verify="thorough", max_tokens=80)
    assert any(check.name == "compiled program" for check in fast.report["checks"])
    compiled = dict(fast.executor.compile_seconds)
    for tokens in (40, 3, 1, 1, 17):
        fast(torch.randint(3, 60, (2, tokens)))
    assert fast.executor.compile_seconds == compiled  # and nothing compiles again
