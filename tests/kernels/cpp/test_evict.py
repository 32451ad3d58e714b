"""Which token leaves its slot for a new one, against the rule said over a list, and what a step notes of the others."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.cpp.host.attention import spec_of
from kvcompile.kernels.cpp.host.ops import cpp_attend, ready
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, Scored, Slots
from tests.support.budget import within

# Slots are looked at 16 at a time, and scored 64 at a time: some of each, and some over.
SINKS, SCORED, RECENT = 3, 130, 9
SLOTS = SINKS + SCORED + RECENT
HEADS, KV_HEADS, DIM = 6, 2, 16
RETENTIONS = {
    "sum": Scored(SINKS, SCORED, RECENT),
    "mean_age": Scored(SINKS, SCORED, RECENT, score="mean_age", pooling="max"),
    "of a layer": Scored(SINKS, SCORED, RECENT, granularity="layer"),
}


def leaving(score: list[float], token: list[int], position: int, mean_age: bool) -> int:
    """The slot whose token leaves: of the lowest score, of equals the oldest; sinks and the newest stay."""
    best = None
    for slot, held in enumerate(token):
        if SINKS <= held <= position - RECENT and not math.isnan(score[slot]):
            value = torch.tensor(score[slot]) / (position - held if mean_age else 1)
            if best is None or (value, held) < best[:2]:
                best = (value, held, slot)
    assert best is not None
    return int(best[2])


def step(
    layout: CacheLayout, token: Tensor, score: Tensor, position: int, random: torch.Generator, times: int = 1
) -> tuple[Tensor, Tensor]:
    """Changes what is noted, [units, SLOTS]; the queries [KV_HEADS, group, DIM] and keys [KV_HEADS, SLOTS, DIM]."""
    ready()
    q, k, v = (torch.randn(1, n, 1, DIM, generator=random) for n in (HEADS, KV_HEADS, KV_HEADS))
    specs = layout.buffers(KV_HEADS, DIM, DIM, torch.float32, SLOTS)
    keys, values = (torch.randn(1, *spec.shape, generator=random) for spec in specs[:2])
    site = SiteSpec(layout, 0.25, kernels="cpp")
    text = spec_of(site, (HEADS, KV_HEADS), (DIM, DIM), "torch.float32").to_json()
    buffers = [keys, values, token[None], score[None]]
    at = torch.tensor([[position]])
    for _ in range(times):
        cpp_attend(q, k, v, buffers, at, [], None, None, None, None, [], DIM, text)
    return q[0, :, 0].view(KV_HEADS, -1, DIM), keys[0]


def scores(before: Tensor, q: Tensor, keys: Tensor, pooling: str, dtype: torch.dtype) -> Tensor:
    """[units, SLOTS] after a step, in `dtype`."""
    weights = (0.25 * q.to(dtype) @ keys.to(dtype).mT).softmax(-1).view(len(before), -1, SLOTS)
    return before.to(dtype) + (weights.amax(1) if pooling == "max" else weights.mean(1))


@pytest.mark.parametrize("name", RETENTIONS)
@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 5, 1000]),
    st.integers(SLOTS, SLOTS + 300),
    st.booleans(),
)
def test_the_lowest_score_leaves_of_equals_the_oldest(
    name: str, seed: int, values: int, position: int, none: bool
) -> None:
    """values: how many scores differ; none: some are no numbers"""
    random = torch.Generator().manual_seed(seed)
    retention = RETENTIONS[name]
    layout = CacheLayout(placement=Slots(), retention=retention)
    units = 1 if retention.granularity == "layer" else KV_HEADS
    # The sinks, the newest, and any of the tokens between them, in any slots.
    between = SINKS + torch.arange(position - RECENT + 1 - SINKS)
    newest = torch.arange(position - RECENT + 1, position)

    def shuffled(tokens: Tensor) -> Tensor:
        return tokens[torch.randperm(len(tokens), generator=random)]

    token = torch.stack(
        [
            shuffled(torch.cat([torch.arange(SINKS), shuffled(between)[: SCORED + 1], newest]))
            for _ in range(units)
        ]
    ).int()
    score = torch.randint(0, values, token.shape, generator=random).float() / 8
    if none:
        score[:, torch.randperm(SLOTS, generator=random)[: SLOTS // 4]] = float("nan")
    held, scored = token.clone(), score.clone()
    q, keys = step(layout, held, scored, position, random)

    for unit in range(units):
        slot = leaving(score[unit].tolist(), token[unit].tolist(), position, name == "mean_age")
        token[unit, slot], score[unit, slot] = position, 0.0
        assert held[unit].tolist() == token[unit].tolist()
    there = ~score.isnan()
    assert torch.equal(~scored.isnan(), there)
    torchs, truth = (
        scores(score, q, keys, retention.pooling, dtype) for dtype in (torch.float32, torch.float64)
    )
    within(scored[there], torchs[there], truth[there], torch.float32, few=True)


def test_a_token_that_comes_again_and_again_takes_a_slot_of_the_cache() -> None:
    """A step may be made again. Where all have left that may, nothing behind the slots is written, and sinks stay."""
    layout = CacheLayout(placement=Slots(), retention=RETENTIONS["of a layer"])
    tokens = torch.arange(2 * SLOTS).int()
    token, score = tokens.clone(), torch.zeros(2 * SLOTS)
    random = torch.Generator().manual_seed(0)
    step(layout, token[None, :SLOTS], score[None, :SLOTS], SLOTS, random, times=SCORED + 20)
    assert token[SLOTS:].tolist() == tokens[SLOTS:].tolist() and not score[SLOTS:].any()
    assert token[:SINKS].tolist() == [0, 1, 2]
    assert set(token[SINKS : SLOTS - RECENT + 1].tolist()) == {SLOTS}
