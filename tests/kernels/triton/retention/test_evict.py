"""The slot that append finds, and role score, against the reference's `slot_for` and what a step adds to the scores;
page_copy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvcompile.kernels.reference import score_sums
from kvcompile.kernels.reference.retention.by_score import slot_for
from kvcompile.kernels.triton.append import append as append_role
from kvcompile.kernels.triton.append import page_copy as page_copy_role
from kvcompile.kernels.triton.host import ops_write  # noqa: F401  (registers the ops)
from kvcompile.kernels.triton.retention import evict
from kvcompile.kernels.triton.retention import score as score_role
from kvcompile.layouts import (
    CacheLayout,
    Paged,
    Ring,
    Scored,
    Slots,
    Window,
    fp8,
    int8,
    model_dtype,
    with_residual,
)
from tests.support.triton_write import (
    HKV,
    HQ,
    Site,
    as_bits,
    kernels_folder,  # noqa: F401  (a fixture)
    vectors,
)

ops = torch.ops.kvcompile
WINDOW = CacheLayout(placement=Ring(), retention=Window(4))


# Smaller examples would take minutes where it fails.
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    sinks=st.integers(0, 3),
    heavy=st.integers(1, 9),
    recent=st.integers(1, 6),
    score=st.sampled_from(("sum", "mean_age", "last")),
    granularity=st.sampled_from(("kv_head", "layer")),
    storage=st.sampled_from((model_dtype(), int8(), with_residual(fp8("e4m3", "head"), 0, 2))),
    placement=st.sampled_from((Slots(), Paged(4))),
    block=st.sampled_from((4, 16)),
    rows=st.sampled_from((1, 2, 8)),
    levels=st.sampled_from((1, 3, 1000)),
    seed=st.integers(0, 99),
)
def test_the_slot_is_that_of_the_reference(
    sinks, heavy, recent, score, granularity, storage, placement, block, rows, levels, seed
) -> None:
    """Slots in any order, with many equal scores; sequences that are full, that are not, and padding.

    Keys and values stand there as an append writes them that is told the slots, and nothing else is written.
    """
    retention = Scored(sinks, heavy, recent, score=score, granularity=granularity)
    layout, budget = CacheLayout(storage, storage, placement, retention), retention.tokens
    site = Site(layout, (16, 8))
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
    q, k, v = (
        vectors(seed + i, (len(lens), h, 1, d), torch.float32)
        for i, (h, d) in enumerate(((HQ, 16), (HKV, 16), (HKV, 8)))
    )
    parts, table = site.buffers(len(lens))
    ours, theirs = ([x.clone() for x in parts[:-2]] for _ in range(2))
    spec = replace(site.spec("append", "one", "full", "q_out", block_n=rows), block_m=block).to_json()
    (q_out,) = ops.triton_append(q, k, v, [*ours, token, values], positions, [], None, table, spec)
    assert torch.equal(token, wanted_token) and torch.equal(values, wanted_score)
    assert torch.equal(q_out, torch.where((positions >= 0)[:, None, :, None], q, 0.0))
    told = site.spec("append", "full", block_n=1).to_json()
    ops.triton_append(None, k, v, theirs, positions, [], wanted.to(torch.int32), table, told)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(as_bits(mine), as_bits(other))


def test_a_program_writes_all_that_a_slot_of_its_own_holds() -> None:
    """It is the only one that reads or writes the notes of its heads: programs of a launch run in any order."""
    for granularity, kv_heads, wanted in (("kv_head", 8, (8, 1)), ("layer", 8, (1, 8)), ("layer", 3, (1, 4))):
        layout = CacheLayout(placement=Slots(), retention=Scored(1, 6, 3, granularity=granularity))
        spec = replace(
            Site(layout).spec("append", "one", "q_out", block_n=4), num_qo_heads=24, num_kv_heads=kv_heads
        )
        first, queries = append_role.works(spec)
        assert (first.programs, first.rows) == wanted and queries.programs == 6
        text = append_role.generate(spec).text
        assert text.count("= evicted(") == 1
        assert "slots_token" not in " ".join(queries.lines) and "slots_score" not in " ".join(queries.lines)


@pytest.mark.parametrize("granularity", ["kv_head", "layer"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("score", ["sum", "mean_age", "last"])
@pytest.mark.parametrize(("queries", "blocks"), [(HQ, (8, 4)), (3 * HKV, (8, 4)), (HQ, (4, 8))])
def test_shares_are_those_of_the_reference(
    score: str, pooling: str, granularity: str, queries: int, blocks: tuple[int, int]
) -> None:
    """Of slots that hold a token; a padded sequence keeps its scores, and so does what stands in free slots.

    blocks: slots of a program, and slots that share a level
    """
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
    block_n, tile = blocks
    spec = replace(Site(layout).spec("score", block_n=block_n), num_qo_heads=queries, block_m=tile)
    log2e = 1 / math.log(2)
    levels = 5 * torch.randn(3, HKV, queries // HKV, -(-budget // tile), generator=g)
    stored = logits * log2e - levels.repeat_interleave(tile, -1)[..., :budget]
    stored[~there[:, None, None].expand_as(stored)] = math.nan  # of free slots decode leaves anything
    ops.triton_score(ours, stored, levels, lse.flatten(1) * log2e, positions, spec.to_json())
    torch.testing.assert_close(ours, wanted, rtol=2e-6, atol=1e-7)
    assert torch.equal(
        ours[~there[:, None].expand(-1, heads, -1)], wanted[~there[:, None].expand(-1, heads, -1)]
    )


def test_roles_of_scores_are_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="score is for retention by scores"):
        score_role.generate(Site(WINDOW).spec("score"))
    with pytest.raises(ValueError, match="no options"):
        score_role.generate(Site(WINDOW).spec("score", "one"))
    votes = CacheLayout(placement=Slots(), retention=Scored(1, 6, 3, "snapkv", "vote"))
    with pytest.raises(ValueError, match="no step changes a score"):
        score_role.generate(Site(votes).spec("score"))


def test_tiles_of_a_search_are_whole_where_they_can_be() -> None:
    assert [evict.block(n) for n in (1, 100, 1024, 100_000)] == [1, 128, 1024, 2048]


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
