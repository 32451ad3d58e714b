"""Pages: their size changes nothing, tokens stand where the address says, and a compiled step copies no pool.

The oracle is the same layout without pages (`contiguous`, or `ring` where the retention has a window), which
`test_attention.py` holds against the policy. Results are compared bit by bit: paging moves numbers, and computes none.
`tests/runtime/test_pages.py` has the allocator and whole modules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

from kvcompile.errors import RecipeError
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.reference import paged
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    Paged,
    Ring,
    Scored,
    SinkWindow,
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
from kvcompile.layouts import symbols as sy
from kvcompile.recipe import Recipe
from tests.kernels.reference.test_attention import check, rope_tables
from tests.support import reference_cache
from tests.support.runner import run, shuffled

STORAGES: list[Any] = [
    model_dtype(),
    float_dtype("float16"),
    fp8(),
    fp8("e5m2", "none"),
    int8(),
    nf4(32),
    mxfp4(),
    with_hadamard(with_residual(nf4(), 4)),
    uint(4, 32),
    with_hadamard(uint(3, 32)),
    with_residual(uint(2, 32), 6),
    per_channel(2, 4, 8),
    with_hadamard(per_channel(4, 3, 9)),
]
RETENTIONS = [
    Full(),
    Window(5),
    Window(11),
    SinkWindow(3, 17),
    SinkWindow(0, 8),
    SinkWindow(2, 9, "in_cache"),
]
HQ, HKV, D, DV = 4, 2, 64, 32


# ---- kernels


def without_pages(layout: CacheLayout) -> CacheLayout:
    placement = Contiguous() if layout.retention.window is None or layout.released else Ring()
    return CacheLayout(layout.keys, layout.values, placement, layout.retention)


def same(layout: CacheLayout, chunks: Sequence[int], padding: Sequence[int], seed: int = 0) -> None:
    g, total, pads = torch.Generator().manual_seed(seed), sum(chunks), torch.tensor(padding)
    qkv = [torch.randn(len(pads), h, total, d, generator=g) for h, d in ((HQ, D), (HKV, D), (HKV, DV))]
    rope = rope_tables(64) if layout.retention.in_cache else []
    wanted, got = (
        run(SiteSpec(lay, D**-0.5), qkv, chunks, pads, rope, every=8, seed=seed).out
        for lay in (without_pages(layout), layout)
    )
    real = (torch.arange(total) >= pads[:, None])[:, None, :, None].expand_as(got)
    assert got.isfinite().all() and torch.equal(got[real], wanted[real])


@pytest.mark.few(2)
@pytest.mark.parametrize("retention", RETENTIONS, ids=str)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_pages_change_nothing(storage: Any, retention: Any) -> None:
    """Prompts, chunks and steps over the edges of pages, of rings and of groups; ragged."""
    layout = CacheLayout(storage, storage, Paged(12), retention)
    if layout.check():
        assert storage.channelwise and (retention.window or 12 % storage.group)
        return
    for chunks in ([40], [13, 1, 1, 20, 1, 4], [11, *[1] * 14]):
        same(layout, chunks, [0, 9, 3])


@pytest.mark.few(2)
@pytest.mark.parametrize("retention", [r for r in RETENTIONS if r.window is not None], ids=str)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_pages_behind_a_window_are_not_missed(storage: Any, retention: Any) -> None:
    layout = CacheLayout(storage, storage, Paged(12, released=True), retention)
    if layout.check():
        assert (storage.channelwise and 12 % storage.group) or layout.unsettled >= retention.window
        return
    assert layout.in_order and not layout.bounded
    for chunks in ([40], [13, 1, 1, 20, 1, 4], [11, *[1] * 34]):
        check(SiteSpec(layout, D**-0.5), chunks, [0, 9, 3])
        if layout.in_full or storage.channelwise:  # else fewer slots are read, and sums have another order
            same(layout, chunks, [0, 9, 3])


def test_of_a_long_text_no_more_is_read_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    read, inner = [], paged.stored_at

    def noted(storage: Any, parts: Any, table: Any, slots: Tensor) -> Any:
        read.append(slots.shape[1])
        return inner(storage, parts, table, slots)

    monkeypatch.setattr(paged, "stored_at", noted)
    layout = CacheLayout(int8(), int8(), Paged(12, released=True), SinkWindow(3, 17))
    check(SiteSpec(layout, D**-0.5), [4, 300, 20, 1], [0, 9])
    assert read[::2] == read[1::2] == [3 + 8, 3 + 304, 3 + 16 + 20, 3 + 16 + 1]


@settings(max_examples=60, deadline=None)
@given(
    keys=st.sampled_from(STORAGES),
    values=st.sampled_from(STORAGES),
    retention=st.sampled_from(RETENTIONS),
    page_size=st.one_of(st.integers(8, 24), st.sampled_from([32, 100, 255, 256])),
    chunks=st.lists(st.integers(1, 19), min_size=1, max_size=6),
    padding=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_page_size_changes_nothing(
    keys: Any, values: Any, retention: Any, page_size: int, chunks: list[int], padding: list[int], seed: int
) -> None:
    layout = CacheLayout(keys, values, Paged(page_size), retention)
    assume(layout.check() is None)
    # Also rows that are all padding in the first chunks, and have no page yet.
    same(layout, chunks, [min(pad, sum(chunks) - 1) for pad in padding], seed)


@given(
    page_size=st.integers(8, 40),
    retention=st.sampled_from(RETENTIONS),
    length=st.integers(1, 70),
    start=st.integers(0, 69),
)
def test_tokens_stand_where_the_address_says(page_size: int, retention: Any, length: int, start: int) -> None:
    """One symbolic definition: what `append` writes is found at `physical_address`, and nowhere else."""
    layout = CacheLayout(model_dtype(), model_dtype(), Paged(page_size), retention)
    start = min(start, length - 1)
    table = shuffled(layout, 2, 80)
    pools = [torch.full((table.numel() + 4, HKV, page_size, d), -1.0) for d in (D, DV)]
    positions = torch.arange(start, length)[None].expand(2, -1)
    marks = positions + 1000 * torch.arange(2)[:, None]
    k, v = (marks[:, None, :, None].expand(-1, HKV, -1, d).float().contiguous() for d in (D, DV))
    reference_cache.append(k, v, pools, positions, torch.full((2,), start), layout, table)
    window, sinks = retention.window or length, retention.sinks
    live = [pos for pos in range(start, length) if pos < sinks or pos >= length - window]
    for row, entries in enumerate(table.tolist()):
        address = sympy.lambdify(sy.pos, layout.physical_address, [{"table": entries.__getitem__}, "math"])
        slot_of = sympy.lambdify(sy.pos, layout.address, "math")
        for pos in live:
            assert address(pos) == entries[slot_of(pos) // page_size] * page_size + slot_of(pos) % page_size
            for pool in pools:
                assert (pool.transpose(0, 1).flatten(1, 2)[:, address(pos)] == 1000 * row + pos).all()
    assert int((pools[0][..., 0] >= 0).sum()) == 2 * HKV * len(live)


def test_padding_is_written_where_no_token_stands() -> None:
    """At the end of the table: in whatever order the rows of one call are written, the real ones stay."""
    pool, table = torch.zeros(4, 1, 8, 1), torch.tensor([[2, 3], [1, 0]], dtype=torch.int32)
    rows = torch.tensor([[0, 1, -1, -2], [0, 7, -1, -8]])
    paged.write(pool, table, rows, torch.arange(1.0, 9.0).view(2, 1, 4, 1))
    first, second = paged.read(pool, table, torch.arange(16)[None])[:, 0, :, 0]
    assert first.tolist() == [1, 2, *[0] * 12, 4, 3]
    # The end of the second table has no page: what is written there goes to the page of nobody.
    assert second[:8].tolist() == [5, 0, 0, 0, 0, 0, 0, 6] and pool[0].flatten().tolist() == [8, *[0] * 6, 7]


@given(
    keys=st.sampled_from(STORAGES),
    values=st.sampled_from(STORAGES),
    retention=st.sampled_from(RETENTIONS),
    page_size=st.integers(8, 64),
    pages=st.none() | st.integers(9, 40),
    batch=st.integers(1, 5),
    tokens=st.integers(1, 300),
)
def test_bytes_are_those_of_the_pools(
    keys: Any, values: Any, retention: Any, page_size: int, pages: int | None, batch: int, tokens: int
) -> None:
    layout = CacheLayout(keys, values, Paged(page_size, pages), retention)
    assume(layout.check() is None)
    count = 1 + (pages or batch * -(-min(tokens, layout.slots(tokens)) // page_size))
    real = sum(
        torch.empty((count if b.paged else batch, *b.shape), dtype=b.dtype, device="meta").nbytes
        for b in layout.buffers(3, D, DV, torch.bfloat16, tokens)
    )
    sizes = {sy.B: batch, sy.T: tokens, sy.H: 3, sy.D: D, sy.Dv: DV, sy.P: 2}
    assert layout.bytes.subs(sizes) == real
    assert CacheLayout.from_json(layout.to_json()) == layout


def test_names_and_axes() -> None:
    full, ring = CacheLayout(placement=Paged(16)), CacheLayout(placement=Paged(16, 9), retention=Window(40))
    assert str(full) == "model · paged 16 · full" and str(ring) == "model · paged 16 x 9 · window 40"
    assert (full.in_order, full.bounded, ring.in_order, ring.bounded) == (True, False, False, True)
    assert full.address == CacheLayout().address and ring.slots(None) == 40


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (CacheLayout(placement=Paged(7)), "8 to 256 tokens, got page_size 7"),
        (CacheLayout(placement=Paged(257)), "8 to 256 tokens, got page_size 257"),
        (CacheLayout(per_channel(2, 32, 64), placement=Paged(48)), "48 is no multiple of 32; use 64"),
        (CacheLayout(values=with_hadamard(per_channel(2, 64, 64)), placement=Paged(16)), "use 64"),
        (CacheLayout(per_channel(4, 16, 16), placement=Paged(16), retention=Window(9)), "order of tokens"),
        (CacheLayout(placement=Paged(16, 3), retention=SinkWindow(4, 60)), "takes 4 pages of 16 tokens"),
        (CacheLayout(placement=Paged(16, released=True)), "retention 'full' has not: leave out released"),
        (
            CacheLayout(placement=Paged(16, released=True), retention=Scored(1, 2, 3)),
            "keeps tokens wherever they are: leave out released",
        ),
        (
            CacheLayout(per_channel(4, 8, 16), placement=Paged(16, released=True), retention=Window(16)),
            "the newest 16 tokens come to their pages late",
        ),
    ],
    ids=str,
)
def test_what_makes_no_sense(layout: CacheLayout, reason: str) -> None:
    problem = layout.check()
    assert problem is not None and reason in problem


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"placement": {"kind": "paged", "page_size": 7}}, "cache.placement.page_size: expected"),
        ({"placement": {"kind": "paged", "page_size": 512}}, "less than or equal to 256, got 512"),
        ({"placement": {"kind": "paged", "pages": 0}}, "cache.placement.pages: expected"),
        ({"placement": {"kind": "ring", "page_size": 16}}, "page_size: for kind paged only, not for ring"),
        ({"placement": {"kind": "contiguous", "pages": 9}}, "pages: for kind paged only, not for contiguous"),
        ({"placement": {"kind": "paged", "size": 16}}, "allowed: kind, page_size, pages"),
        (
            {
                "keys": {"dtype": "int2", "axis": "channel", "group": 64, "residual": 64},
                "placement": {"kind": "paged", "page_size": 32},
            },
            "page_size 32 is no multiple of 64; use 64",
        ),
        (
            {"placement": {"kind": "paged", "pages": 2}, "retention": {"kind": "sink_window", "window": 90}},
            "takes 6 pages of 16 tokens, and the pool has 2",
        ),
    ],
)
def test_recipes_that_are_refused(recipe: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load({"cache": recipe})
    assert reason in str(caught.value)


# ---- compiled


@pytest.mark.parametrize(
    "layout",
    [
        CacheLayout(int8(), model_dtype(), Paged(16)),
        pytest.param(CacheLayout(per_channel(2, 32, 64), fp8(), Paged(32)), marks=pytest.mark.slow),
        pytest.param(CacheLayout(int8(), int8(), Paged(16), SinkWindow(4, 90)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_compiled_step_copies_no_pool(layout: CacheLayout) -> None:
    """The pools are written in place, and keys and values read from their pages by the loop that uses them."""
    pages, span = 4099, 96
    text = SiteSpec(layout, 0.125).to_json()
    pools = [
        torch.zeros(pages if b.paged else 1, *b.shape, dtype=b.dtype)
        for b in layout.buffers(HKV, D, D, torch.float32, 4096)
    ]
    table = shuffled(layout, 1, 4096)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 1, D, generator=g) for heads in (HQ, HKV, HKV))
    position = torch.full((1, 1), 77)

    def step(table: Tensor, *parts: Tensor) -> Tensor:
        return ops.cached_attention(
            q, k, v, list(parts), position, position[:, 0], [], span, text, page_table=table
        )

    eager = [pool.clone() for pool in pools]
    with fresh_cache(), torch.no_grad():
        got, code = run_and_get_code(torch.compile(step, fullgraph=True), table, *pools)
    wanted = step(table, *eager)
    assert (got - wanted).abs().max() <= 7 * 2**-10 * v.abs().max()
    for new, old in zip(pools, eager, strict=True):
        assert torch.equal((new.float() != 0).any(-1), (old.float() != 0).any(-1))
    made = re.findall(r"empty_strided\w*\(\(([^)]*)\)", "\n".join(code))
    assert made and not [shape for shape in made if "4099" in shape]
    if layout.keys.code == "int8":
        largest = max(eval(shape.replace(", ", "*")) for shape in made)
        assert largest <= HQ * span, "no temporary has the keys or values of all tokens"
