"""Pools of pages: every page has one owner, a module with pages is the one without, an empty pool loses nothing.

The oracle is the same module without pages; results are compared bit by bit. `tests/kernels/reference/test_paged.py`
has the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import kvcompile
from kvcompile.api import build
from kvcompile.errors import LimitError, PlanError
from kvcompile.layouts import (
    PageGroup,
)
from kvcompile.pipeline import Front, understand
from kvcompile.recipe import Recipe
from kvcompile.runtime.cache import KVCache
from kvcompile.runtime.pages import PagePool
from tests.passes.detect.test_shared_kv import CrossLayer
from tests.passes.rules.test_latent import Latent
from tests.support.models import tiny_hf

EAGER = {"compile": {"mode": "none"}, "verify": "off"}


# ---- the allocator


def group(page_size: int = 8, slots: int = 100, pages: int | None = None) -> PageGroup:
    return PageGroup("page_table_0", (0,), page_size, slots, pages)


def holds(pool: PagePool) -> None:
    """Every page has one owner, or is free."""
    owned = [page for row in pool.rows for page in row] + pool._free
    assert sorted(owned) == list(range(1, pool.capacity + 1))
    assert pool.used + pool.free == pool.capacity


@settings(max_examples=150)
@given(
    page_size=st.integers(8, 20),
    slots=st.integers(5, 90),
    pages=st.none() | st.integers(1, 30),
    batch=st.integers(1, 4),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["more", "more", "less", "clear", "move"]),
            st.lists(st.integers(0, 40), min_size=4, max_size=4),
        ),
        max_size=12,
    ),
)
def test_every_page_has_one_owner(
    page_size: int, slots: int, pages: int | None, batch: int, steps: list[tuple[str, list[int]]]
) -> None:
    pool = PagePool(group(page_size, slots, pages))
    pool.clear(batch)
    lengths, contents = [0] * batch, {0: -1}  # contents: which sequence's data a page has
    for what, numbers in steps:
        numbers = numbers[:batch]
        if what == "clear":
            pool.clear(batch)
            lengths = [0] * batch
        elif what == "less":
            lengths = [max(0, old - n) for old, n in zip(lengths, numbers, strict=True)]
            pool.trim(lengths)
        elif what == "more":
            wanted = [old + n for old, n in zip(lengths, numbers, strict=True)]
            before = (pool.capacity, [list(row) for row in pool.rows], list(pool._free))
            need = sum(-(-min(n, slots) // page_size) for n in wanted)
            if pages is not None and need > pages:
                with pytest.raises(LimitError, match=f"at least {need} "):
                    pool.check(wanted)
                assert before == (pool.capacity, pool.rows, pool._free)
                continue
            pool.check(wanted)
            _grow(pool, pool.lacking(wanted))
            pool.extend(wanted)
            lengths = wanted
        else:
            index = [n % batch for n in numbers]
            lengths_then = [lengths[i] for i in index]
            if pages is not None and sum(map(pool.group.pages_for, lengths_then)) > pages:
                continue
            contents = {page: (i, at) for i, row in enumerate(pool.rows) for at, page in enumerate(row)}
            _grow(pool, pool.moves(index).more)
            moves = pool.moves(index)
            assert moves.more == 0
            assert not {a for a, _ in moves.copies} & {b for _, b in moves.copies}
            stays = [i for i, source in enumerate(index) if source == i]
            assert all(moves.rows[i] == tuple(pool.rows[i]) for i in stays), "nothing moves that stays"
            pool.move(moves)
            contents |= {to: contents[source] for source, to in moves.copies}
            for row, source in zip(pool.rows, index, strict=True):
                assert [contents[page] for page in row] == [(source, at) for at in range(len(row))]
            lengths = lengths_then
        holds(pool)
        assert [len(row) for row in pool.rows] == [-(-min(n, slots) // page_size) for n in lengths]
    pool.clear(batch)
    assert pool.used == 0
    holds(pool)


def _grow(pool: PagePool, lacking: int) -> None:
    if lacking:
        capacity = pool.capacity_for(lacking)
        assert pool.capacity + lacking <= capacity
        pool.grow(capacity)


def test_a_pool_grows_by_half_and_never_beyond_the_batch() -> None:
    pool = PagePool(group(8, 400))
    pool.clear(2)
    sizes = []
    for length in range(8, 401, 8):
        if lacking := pool.lacking([length, length]):
            pool.grow(pool.capacity_for(lacking))
            sizes.append(pool.capacity)
        pool.extend([length, length])
    assert sizes == [2, 4, 6, 9, 13, 19, 28, 42, 63, 94, 100]


# ---- the module

PAGED = {"kind": "paged", "page_size": 8}
CACHES: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"retention": {"kind": "window", "size": 13}},
    "in_cache": {"retention": {"kind": "sink_window", "sinks": 3, "window": 10, "positions": "in_cache"}},
    "int8": {"keys": {"dtype": "int8"}, "values": {"dtype": "int8"}},
    "fp8": {"keys": {"dtype": "fp8_e4m3"}},
    "kivi": {
        "keys": {"dtype": "int4", "axis": "channel", "group": 32, "residual": 32},
        "values": {"dtype": "int4", "residual": 32},
        "placement": {"kind": "paged", "page_size": 32},
    },
}


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_hf("llama")


@lru_cache
def front_of(model: nn.Module) -> Front:
    return understand(model)


def built(model: nn.Module, recipe: Any, **more: Any) -> Any:
    """As `optimize`; a model is traced once for all recipes."""
    return build(model, front_of(model), Recipe.load(recipe, **{**EAGER, **more}))


def optimized(model: nn.Module, cache: dict[str, Any], max_tokens: int | None = 80, **more: Any) -> Any:
    runtime = {"max_tokens": max_tokens, "prefill_chunk": 12}
    return built(model, {"cache": {"placement": PAGED, **cache}, "runtime": runtime}, **more)


def unpaged(model: nn.Module, cache: dict[str, Any]) -> Any:
    cache = {axis: value for axis, value in cache.items() if axis != "placement"}
    return built(model, {"cache": cache, "runtime": {"max_tokens": 80, "prefill_chunk": 12}})


def tokens(batch: int = 1, count: int = 45, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, (batch, count), generator=torch.Generator().manual_seed(seed))


def padding(*pads: int, count: int) -> Tensor:
    return (torch.arange(count) >= torch.tensor(pads)[:, None]).long()


def feed(fast: Any, ids: Tensor, mask: Tensor, chunks: Sequence[int]) -> Tensor:
    outs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        outs.append(fast(ids[:, part], mask[:, part]).logits)
        start += size
    return torch.cat(outs, 1)[mask.bool()]


def state(cache: KVCache) -> dict[str, Any]:
    """All that a failed call must leave as it was."""
    buffers = {name: (b.data_ptr(), b.view(torch.uint8).clone()) for name, b in cache.buffers.items()}
    pools = [(p.capacity, [list(row) for row in p.rows], list(p._free)) for p in cache.pools]
    return {
        "counts": (cache.batch, cache.columns, cache.seq_lens.tolist(), list(cache._seen), cache.nbytes),
        "buffers": {name: (pointer, data.tolist()) for name, (pointer, data) in buffers.items()},
        "pools": pools,
    }


@pytest.mark.parametrize("what", CACHES)
def test_a_module_with_pages_is_the_module_without(llama: nn.Module, what: str) -> None:
    ids, mask = tokens(3, 60), padding(0, 17, 3, count=60)
    paged_one, other = optimized(llama, CACHES[what]), unpaged(llama, CACHES[what])
    for chunks in ([60], [20, 1, 1, 9, 1, 28]):
        paged_one.reset()
        other.reset()
        assert torch.equal(feed(paged_one, ids, mask, chunks), feed(other, ids, mask, chunks))
    (pool,) = paged_one.cache.pools
    size, slots = pool.group.page_size, pool.group.slots
    assert [len(row) for row in pool.rows] == [-(-min(n, slots) // size) for n in (60, 43, 57)]
    holds(pool)
    paged_one.reset()
    assert pool.used == 0 and not paged_one.cache.buffers["page_table_0"].any()


def test_layers_with_other_windows_have_tables_of_their_own() -> None:
    model = tiny_hf("gemma3", layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    fast, baseline = (built(model, recipe, max_tokens=80) for recipe in ("paged", "baseline"))
    ids, mask = tokens(2, 40), padding(0, 7, count=40)
    assert torch.equal(*(feed(m, ids, mask, [21, 1, 18]) for m in (fast, baseline)))
    sliding, full = fast.cache.report()["pools"]
    assert (sliding["layers"], full["layers"]) == ([0, 2], [1, 3])
    assert (sliding["used"], full["used"]) == (2 * 1, 3 + 3)  # of 9 slots; of 40 and 33 tokens
    cache = fast.cache
    assert cache.report() == {
        "bytes": cache.nbytes,
        "reserved": cache.reserved,
        "sequences": 2,
        "columns": 40,
        "pools": [sliding, full],
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("model", [CrossLayer(window=20), Latent()], ids=["shared", "latent"])
@pytest.mark.parametrize("retention", [{"kind": "full"}, {"kind": "window", "size": 13}], ids=str)
def test_shared_caches_and_latent_rows_in_pages(model: nn.Module, retention: dict[str, Any]) -> None:
    """Readers find the pages of the layer that they read; an MLA row is one head, with the values in it."""
    fast = optimized(model, {"retention": retention}, verify="quick")
    other = unpaged(model, {"retention": retention})
    ids = tokens(2, 40)
    for part in ids.split([21, 1, 1, 17], dim=1):
        assert torch.equal(fast(part), other(part))
    (pool,) = fast.cache.pools
    assert pool.group.layers == (0, 1) and [len(row) for row in pool.rows] == [pool.group.pages_for(40)] * 2


@pytest.mark.parametrize("recipe", ["paged", "paged_int8"])
def test_memory_is_what_plan_and_estimate_say(recipe: str) -> None:
    """At the limit of tokens to the byte; before it, pages for the tokens that are there."""
    model = tiny_hf("llama", hidden_size=192, head_dim=32)
    fast = kvcompile.optimize(model, recipe, max_tokens=75, **EAGER)
    for batch in (1, 3):
        fast.release()
        fast(tokens(batch, 20))
        page = fast.plan.bytes_per_token * 16
        table = batch * 5 * 4
        assert fast.cache.nbytes == (1 + 2 * batch) * page + table
        for step in range(55):
            fast(tokens(batch, 1, step))
        assert fast.cache.nbytes == fast.plan.bytes(batch) == (1 + 5 * batch) * page + table
        told = kvcompile.estimate(model, recipe, batch=batch, tokens=75, max_tokens=75)
        assert told.bytes == fast.cache.nbytes
        assert told.bytes_per_token_later == told.bytes_per_token == fast.plan.bytes_per_token
        assert kvcompile.estimate(fast, batch=batch).bytes == fast.cache.nbytes
    assert sum(b.untyped_storage().nbytes() for b in fast.cache.buffers.values()) == fast.cache.nbytes


def test_memory_of_a_pool_of_given_size(llama: nn.Module) -> None:
    fast = optimized(llama, {"placement": {**PAGED, "pages": 20}}, max_tokens=75)
    for batch in (1, 3):
        fast.release()
        fast(tokens(batch, 4))
        assert (
            fast.cache.nbytes == fast.plan.bytes(batch) == 21 * 8 * fast.plan.bytes_per_token + batch * 10 * 4
        )


def test_an_empty_pool_loses_nothing(llama: nn.Module) -> None:
    fast = optimized(llama, {"placement": {**PAGED, "pages": 7}}, max_tokens=40)
    free = unpaged(llama, {})
    ids, mask = tokens(2, 22), padding(0, 10, count=22)
    assert torch.equal(feed(fast, ids, mask, [22]), feed(free, ids, mask, [22]))  # 3 pages and 2
    fast(tokens(2, 4)), free(tokens(2, 4))  # 26 and 16 tokens: 4 pages and 2
    before = state(fast.cache)
    with pytest.raises(LimitError) as caught:
        fast(tokens(2, 7))  # 33 and 23 tokens: 5 pages and 3
    assert state(fast.cache) == before
    for part in (
        "1 of the pool's 7 pages (of 8 tokens) are free",
        "needs 2 more (sequence 0: 1, sequence 1: 1)",
        "in use: sequence 0: 4, sequence 1: 2",
        "Nothing was written",
        "pages to at least 8",
        "reset()",
    ):
        assert part in str(caught.value)
    assert torch.equal(fast(tokens(2, 6)).logits, free(tokens(2, 6)).logits)  # 32 and 22: 4 and 3
    fast.reset()
    with pytest.raises(LimitError, match=r"needs 8 more \(sequence 0: 2, .* in use: none"):
        fast(tokens(4, 16))
    assert fast.cache.batch == 2
    assert fast(tokens(7, 8)).logits.shape[0] == 7


def test_other_sequences_find_the_pages_of_the_last(llama: nn.Module) -> None:
    """Pools are kept over a reset, for any number of sequences; release() frees."""
    fast, free = optimized(llama, {}), unpaged(llama, {})
    fast(tokens(2, 80))
    (pool,) = fast.cache.pools
    buffer = fast.cache.buffers["cache_0_keys_data"]
    for batch in (5, 1, 2):
        fast.reset()
        free.reset()
        assert torch.equal(fast(tokens(batch, 20)).logits, free(tokens(batch, 20)).logits)
        assert fast.cache.buffers["cache_0_keys_data"] is buffer and pool.capacity == 20
        assert pool.used == 3 * batch
    fast.release()
    assert fast.cache.nbytes == 0 and (pool.capacity, pool.used) == (0, 0)
    assert torch.equal(fast(tokens(2, 30)).logits, free.reset() or free(tokens(2, 30)).logits)


def test_a_failed_pass_gives_its_pages_back(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, free = optimized(llama, {}), unpaged(llama, {})
    fast(tokens(2, 20)), free(tokens(2, 20))
    (pool,) = fast.cache.pools
    used, table = pool.used, fast.cache.buffers["page_table_0"].clone()
    with monkeypatch.context() as patch:
        patch.setattr(fast.executor, "run", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fast(tokens(2, 30))
    assert pool.used == used and torch.equal(fast.cache.buffers["page_table_0"], table)
    holds(pool)
    assert torch.equal(fast(tokens(2, 30)).logits, free(tokens(2, 30)).logits)


def test_out_of_memory_while_a_pool_grows(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, free = optimized(llama, {"keys": {"dtype": "int8"}}), unpaged(llama, {"keys": {"dtype": "int8"}})
    zeros, calls = torch.zeros, []

    def fails(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no memory")
        return zeros(*args, **kwargs)

    def attempt(count: int) -> None:
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", fails)
            with pytest.raises(torch.OutOfMemoryError):
                fast(tokens(2, count))
        assert len(calls) == 5

    attempt(20)
    assert fast.cache.columns == 0
    fast(tokens(2, 20)), free(tokens(2, 20))
    attempt(40)
    shapes = {b.shape[0] for name, b in fast.cache.buffers.items() if name.startswith("cache")}
    assert shapes == {7} and fast.cache.columns == 20
    assert torch.equal(fast(tokens(2, 40)).logits, free(tokens(2, 40)).logits)


@pytest.mark.parametrize("what", CACHES)
def test_beams_have_pages_of_their_own(llama: nn.Module, what: str) -> None:
    """Any reordering, over ragged rows; then every row goes on by itself."""
    fast, free = optimized(llama, CACHES[what]), unpaged(llama, CACHES[what])
    ids, mask = tokens(4, 37), padding(0, 20, 9, 1, count=37)
    feed(fast, ids, mask, [37]), feed(free, ids, mask, [37])
    for step, order in enumerate(([2, 0, 0, 2], [3, 3, 1, 1], [1, 2, 3, 0], [0, 0, 0, 0], [0, 1, 2, 3])):
        for each in (fast, free):
            each.cache.reorder(torch.tensor(order))
        assert torch.equal(fast.cache.seq_lens, free.cache.seq_lens)
        assert fast.cache._seen == fast.cache.seq_lens.tolist()
        new = tokens(4, 1 + step, seed=step)
        assert torch.equal(fast(new).logits, free(new).logits)
        holds(fast.cache.pools[0])


def test_beams_that_a_pool_has_no_pages_for(llama: nn.Module) -> None:
    fast = optimized(llama, {"placement": {**PAGED, "pages": 6}}, max_tokens=40)
    feed(fast, tokens(2, 30), padding(0, 20, count=30), [30])  # 4 pages and 2
    before = state(fast.cache)
    with pytest.raises(LimitError, match="needs 8 more"):
        fast.cache.reorder(torch.tensor([0, 0]))
    assert state(fast.cache) == before
    fast.cache.reorder(torch.tensor([1, 0]))
    assert fast.cache.seq_lens.tolist() == [10, 30]


def test_beam_search_and_what_would_not_fit_at_the_end(llama: nn.Module) -> None:
    fast, free = optimized(llama, {"placement": {**PAGED, "pages": 12}}, max_tokens=60), unpaged(llama, {})
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    ids, mask = tokens(2, 9), padding(0, 4, count=9)
    for prompt in (ids[:1], ids[:, :5]):
        outs = [m.generate(prompt, **{**beams, "max_new_tokens": 8}) for m in (fast, free)]
        assert torch.equal(*outs)
    before = state(fast.cache)
    with pytest.raises(LimitError, match=r"needs 18 more \(sequence 0: 3, .*pages to at least 18"):
        fast.generate(ids, **beams)
    assert state(fast.cache) == before, "nothing was computed, and the cache is as it was"
    # 24 and 20 tokens; padding takes no page.
    fast.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=16, pad_token_id=0)
    with pytest.raises(LimitError, match="needs 7 more"):
        small = optimized(llama, {"placement": {**PAGED, "pages": 6}}, max_tokens=40)
        small.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=17, pad_token_id=0)


def test_conversations_go_on_in_pages(llama: nn.Module) -> None:
    fast, free = optimized(llama, {"placement": {**PAGED, "pages": 10}}, max_tokens=60), unpaged(llama, {})
    turns = []
    for each in (fast, free):
        out = each.generate(tokens(2, 9), max_new_tokens=8, do_sample=False)
        more = torch.cat([out, tokens(2, 11, 3)], dim=1)
        turns.append(each.generate(more, past_key_values=each.handle, max_new_tokens=9, do_sample=False))
    assert torch.equal(*turns)  # 37 tokens each, of which the last is not in the cache
    before = state(fast.cache)
    with pytest.raises(
        LimitError, match=r"0 of the pool's 10 pages .* needs 2 more .* in use: sequence 0: 5"
    ):
        longer = torch.cat([turns[0], tokens(2, 3)], dim=1)
        fast.generate(longer, past_key_values=fast.handle, max_new_tokens=4)
    assert state(fast.cache) == before


def test_a_pool_smaller_than_the_limit_of_tokens(llama: nn.Module) -> None:
    placement = {"kind": "paged", "pages": 5}
    with pytest.raises(
        PlanError, match=r"80 tokens in all \(paged 16 x 5\): set at most 80, or pages to at least 6"
    ):
        optimized(llama, {"placement": placement}, max_tokens=81)
    assert optimized(llama, {"placement": placement}, max_tokens=None).plan.limits.max_tokens == 80


def test_the_layer_s_own_window_must_fit_its_pool() -> None:
    own = {"placement": {"kind": "paged", "page_size": 8, "pages": 1}, "retention": {"kind": "window"}}
    with pytest.raises(PlanError, match="retention 'window 9' takes 2 pages"):
        optimized(tiny_hf("mistral"), own)


def test_an_estimate_of_what_a_pool_holds() -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "dtype": "bfloat16",
    }  # fmt: skip
    cache = {"placement": {"kind": "paged", "page_size": 16, "pages": 64}}
    cost = kvcompile.estimate(config, {"cache": cache}, tokens=100, batch=3, memory="1GiB")
    page = 16 * 2 * 2 * 2 * 16 * 2
    assert cost.bytes == 65 * page + 3 * 7 * 4
    assert cost.fit is not None and (cost.fit.tokens, cost.fit.sequences) == (21 * 16, 9)
    assert not cost.notes
    (note,) = kvcompile.estimate(config, {"cache": cache}, tokens=100, batch=10).notes
    assert note == "a pool of 64 pages (paged 16 x 64) holds 9 sequences of 100 tokens, not 10"


# ---- compiled


@pytest.fixture
def empty_inductor_cache() -> Iterator[None]:
    with fresh_cache():
        yield


@pytest.mark.slow  # test_compile.py has it of other caches
@pytest.mark.usefixtures("empty_inductor_cache")
def test_a_pool_that_grows_compiles_nothing_again() -> None:
    model = tiny_hf("llama", layers=1)
    compiled, eager = (
        optimized(model, {}, max_tokens=160, compile={"mode": mode}) for mode in ("default", "none")
    )
    (pool,) = compiled.cache.pools
    sizes, graphs = set(), []
    for step, count in enumerate((9, 1, 1, 20, 1, 40, 1, 1, 60, 1)):
        ids = tokens(2, count, step)
        got, wanted = (fast(ids).logits for fast in (compiled, eager))
        # Fused sums are in another order.
        assert (got - wanted).abs().max() <= 64 * torch.finfo(got.dtype).eps * wanted.abs().max()
        sizes.add(pool.capacity)
        graphs.append(counters["aot_autograd"]["total"])
    assert len(sizes) > 3 and graphs[1] > 0
    for batch in (3, 2):
        compiled.reset()
        compiled(tokens(batch, 30))
        compiled(tokens(batch, 1))
    assert counters["aot_autograd"]["total"] == graphs[1]
