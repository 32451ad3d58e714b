"""Roles evict and score against the reference's `_slot_for` and what a step adds to the scores; page_copy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.kernels.reference import score_sums
from kvcompile.kernels.reference.retention.by_score import slot_for
from kvcompile.kernels.triton.append import page_copy as page_copy_role
from kvcompile.kernels.triton.host import ops_write  # noqa: F401  (registers the ops)
from kvcompile.kernels.triton.retention import evict as evict_role
from kvcompile.kernels.triton.retention import score as score_role
from kvcompile.layouts import CacheLayout, Ring, Scored, Slots, Window
from tests.support.triton_write import (
    HKV,
    HQ,
    Site,
    kernels_folder,  # noqa: F401  (a fixture)
)

ops = torch.ops.kvcompile
WINDOW = CacheLayout(placement=Ring(), retention=Window(4))


@settings(max_examples=25, deadline=None)
@given(
    sinks=st.integers(0, 3),
    heavy=st.integers(1, 9),
    recent=st.integers(1, 6),
    score=st.sampled_from(("sum", "mean_age", "last")),
    granularity=st.sampled_from(("kv_head", "layer")),
    block=st.sampled_from((4, 16)),
    levels=st.sampled_from((1, 3, 1000)),
    seed=st.integers(0, 99),
)
def test_the_slot_is_that_of_the_reference(
    sinks, heavy, recent, score, granularity, block, levels, seed
) -> None:
    """Slots in any order, with many equal scores; sequences that are full, that are not, and padding."""
    retention = Scored(sinks, heavy, recent, score=score, granularity=granularity)
    layout, budget = CacheLayout(placement=Slots(), retention=retention), retention.tokens
    g = torch.Generator().manual_seed(seed)
    lens = torch.tensor([budget + 7, budget, max(budget - 1, 0), 0, -1])
    heads = HKV if granularity == "kv_head" else 1
    token = torch.full((len(lens), heads, budget), 12345, dtype=torch.int32)
    for row, length in zip(token, lens.tolist(), strict=True):
        for own in row:
            # Sinks and the newest are there, of the others some.
            must = [*range(min(sinks, length)), *range(max(length - recent + 1, sinks), length)]
            others = [t for t in range(max(length, 0)) if t not in must]
            more = torch.randperm(len(others), generator=g)[: max(min(budget, length) - len(must), 0)]
            held = torch.tensor(must + [others[i] for i in more.tolist()], dtype=torch.int32)
            order = torch.randperm(len(held), generator=g) if length >= budget else held.argsort()
            own[: len(held)] = held[order]
    values = torch.randint(0, levels, token.shape, generator=g) / 7
    positions = lens[:, None]
    wanted = slot_for(token, values, positions[:, None], layout.address, retention)
    wanted_token, wanted_score = token.clone(), values.clone()
    for b in range(len(lens) - 1):
        for h in range(heads):
            wanted_token[b, h, wanted[b, h, 0]] = int(lens[b])
            wanted_score[b, h, wanted[b, h, 0]] = 0.0
    wanted[-1] = -1
    slots = ops.triton_evict(token, values, positions, Site(layout).spec("evict", block_n=block).to_json())
    assert slots.dtype == torch.int32 and torch.equal(slots, wanted.to(torch.int32))
    assert torch.equal(token, wanted_token) and torch.equal(values, wanted_score)


@pytest.mark.parametrize("granularity", ["kv_head", "layer"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("score", ["sum", "mean_age", "last"])
@pytest.mark.parametrize("queries", [HQ, 3 * HKV])
def test_shares_are_those_of_the_reference(score: str, pooling: str, granularity: str, queries: int) -> None:
    """Of slots that hold a token; a padded sequence keeps its scores, and so does what stands in free slots."""
    retention = Scored(1, 6, 3, score=score, pooling=pooling, granularity=granularity)
    layout, budget = CacheLayout(placement=Slots(), retention=retention), retention.tokens
    g = torch.Generator().manual_seed(2)
    positions = torch.tensor([[25], [4], [-1]])
    there = torch.arange(budget) <= positions
    logits = 3 * torch.randn(3, HKV, queries // HKV, budget, generator=g)
    logits = logits.masked_fill(~there[:, None, None], -math.inf)
    logits[0, :, :, 2] = -math.inf  # hidden by the mask
    sink = torch.randn(3, HKV, queries // HKV, 1, generator=g)
    lse = torch.cat([logits, sink], -1).logsumexp(-1)
    p = (logits - lse[..., None]).exp()
    heads = HKV if granularity == "kv_head" else 1
    ours = torch.rand(3, heads, budget, generator=g)
    share = score_sums.pooled(p, retention)
    wanted = torch.where(there[:, None], share if score == "last" else ours + share, ours)
    spec = replace(Site(layout).spec("score", block_n=8), num_qo_heads=queries, block_m=4)
    log2e = 1 / math.log(2)
    levels = 5 * torch.randn(3, HKV, queries // HKV, -(-budget // 4), generator=g)
    stored = logits * log2e - levels.repeat_interleave(4, -1)[..., :budget]
    ops.triton_score(ours, stored, levels, lse.flatten(1) * log2e, positions, spec.to_json())
    torch.testing.assert_close(ours, wanted, rtol=2e-6, atol=1e-7)
    assert torch.equal(
        ours[~there[:, None].expand(-1, heads, -1)], wanted[~there[:, None].expand(-1, heads, -1)]
    )


def test_roles_of_scores_are_refused_where_there_are_none() -> None:
    for role, module in (("evict", evict_role), ("score", score_role)):
        with pytest.raises(ValueError, match="is for retention by scores"):
            module.generate(Site(WINDOW).spec(role))
        with pytest.raises(ValueError, match="no options"):
            module.generate(Site(WINDOW).spec(role, "one"))
    votes = CacheLayout(placement=Slots(), retention=Scored(1, 6, 3, "snapkv", "vote"))
    with pytest.raises(ValueError, match="no step changes a score"):
        score_role.generate(Site(votes).spec("score"))


def test_tiles_of_evict_are_whole_where_they_can_be() -> None:
    assert [evict_role.block_n(n) for n in (1, 100, 1024, 100_000)] == [1, 128, 1024, 4096]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 8), (1, 3, 5), (3, 7)], ids=str)
def test_pages_are_copied(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As whole words of four bytes where a page is such, else byte by byte."""
    pool = torch.randint(0, 200, (9, *shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
    before = pool.clone().view(torch.uint8)
    sources, targets = torch.tensor([2, 5, 2]), torch.tensor([1, 8, 4])
    option = page_copy_role.words(pool[0].numel() * dtype.itemsize)
    assert option.startswith("int32") == (pool[0].numel() * dtype.itemsize % 4 == 0)
    spec = Site(WINDOW).spec("page_copy", option, block_n=16)
    ops.triton_page_copy(pool, sources.int(), targets.int(), spec.to_json())
    before[targets] = before[sources]
    assert torch.equal(pool.view(torch.uint8), before)


def test_copies_of_many_beams_fit_a_grid() -> None:
    """64 beams of 32k tokens in pages of 16: a grid's first axis takes 2^31 - 1 programs, the others 65,535."""
    spec = Site(WINDOW).spec("page_copy", page_copy_role.words(8 * 16 * 128 * 2), block_n=1024)
    copies, tiles = page_copy_role.grid(spec, 64 * 32768 // 16)
    assert copies == 131_072 and tiles == 8


@pytest.mark.parametrize("options", [(), ("int32",), ("int32[4]", "uint8[16]"), ("int32[4]", "one")], ids=str)
def test_pages_of_no_size_are_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="page_copy takes one option"):
        page_copy_role.generate(Site(WINDOW).spec("page_copy", *options))
