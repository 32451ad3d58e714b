"""Role append against the reference: the same bits in every part of the cache, and nothing else touched."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvcompile.kernels.reference import codec, residual
from kvcompile.kernels.reference.symbolic import evaluate
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.append import residual as append_residual
from kvcompile.kernels.triton.append import slots
from kvcompile.kernels.triton.append.append import block_n, elements, generate, grid, heads
from kvcompile.kernels.triton.append.operands import Side
from kvcompile.kernels.triton.device import acting_as
from kvcompile.kernels.triton.host import ops_write  # noqa: F401  (registers the ops)
from kvcompile.kernels.triton.host.ops_write import warps
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.supports import unsupported
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    InKeys,
    Paged,
    Placement,
    Retention,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    Storage,
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
from kvcompile.specs import RotaryForm
from tests.support import reference_cache
from tests.support.kernel_specs import H200
from tests.support.marks import cases
from tests.support.triton_write import (
    HKV,
    HQ,
    Site,
    as_bits,
    has_values,
    kernels_folder,  # noqa: F401  (a fixture)
    names,
    new_positions,
    strided,
    vectors,
)

append = torch.ops.kvcompile.triton_append.default

STORAGES: list[Storage] = [
    model_dtype(),
    float_dtype("float16"),
    float_dtype("bfloat16"),
    float_dtype("float32"),
    *[fp8(form, scale) for form in ("e4m3", "e5m2") for scale in ("token", "none", "tensor", "head")],
    fp8("e4m3", "token", "float32"),
    int8(),
    int8(scale_dtype="float32"),
    *[uint(bits, group) for bits in (2, 3, 4, 8) for group in (0, 8)],
    uint(4, 8, "float32"),
    nf4(),
    nf4(8),
    nf4(8, "float32"),
    with_hadamard(nf4(8)),
    with_hadamard(model_dtype()),
    with_hadamard(float_dtype("bfloat16")),
    with_hadamard(fp8()),
    with_hadamard(int8()),
    with_hadamard(uint(3, 8)),
    with_residual(uint(2, 8), 6),
    with_residual(fp8(), 3, 2),
    with_residual(int8(), 0, 3),
    with_hadamard(with_residual(fp8("e5m2", "head"), 4, 1)),
]
PLACED = [
    (Contiguous(), Full()),
    (Contiguous(), Window(5)),
    (Ring(), Window(5)),
    (Ring(), SinkWindow(3, 6)),
    (Paged(8), Full()),
    (Paged(8), SinkWindow(3, 7)),
]


def options(layout: CacheLayout, one: bool) -> tuple[str, ...]:
    if one:
        return ("one", "full")
    return () if layout.in_order else ("full",)


def differs(ours: Tensor, theirs: Tensor) -> Tensor:
    """Which rows [first, heads, row] of a part are not the same bits."""
    different = as_bits(ours) != as_bits(theirs)
    return different.flatten(3).any(-1) if different.dim() > 3 else different


def of_padding(site: Site, name: str, part: Tensor, positions: Tensor, table: Tensor | None) -> Tensor:
    """Rows [first, 1, row] in which the reference leaves padding, where nothing reads it; this writes it nowhere."""
    rows = torch.zeros(part.shape[0], 1, part.shape[2], dtype=torch.bool)
    if name.endswith("full"):
        rows[positions[:, -1] < 0] = positions.shape[1] == 1
    elif table is not None:
        rows[0] = True
    elif positions.shape[1] == 1 or site.layout.in_order:
        for row, own in zip(rows, positions, strict=True):
            row[:, torch.remainder(own[own < 0], part.shape[2])] = True
    return rows


def check_same(
    site: Site,
    ours: list[Tensor],
    theirs: list[Tensor],
    before: list[Tensor],
    positions: Tensor,
    table: Tensor | None,
) -> None:
    for name, mine, other, old in zip(names(site.layout, site), ours, theirs, before, strict=True):
        storage = site.layout.keys if name.startswith("keys") else site.layout.values
        if storage.channelwise and not name.endswith("full"):
            assert not differs(mine, old).any()
            continue
        padding = of_padding(site, name, mine, positions, table).expand(-1, HKV, -1)
        assert not (differs(mine, other) & ~padding).any(), name
        assert not (differs(mine, old) & padding & differs(other, old)).any(), f"{name}: padding was written"


def run(
    site: Site,
    chunks: list[int],
    padding: list[int],
    seed: int = 0,
    size: float = 1.0,
    block_n: int = 4,
    heads: int = 1,
) -> None:
    """Tokens in chunks: each by the kernel, from the state that the reference has left.

    heads: that a program takes of one token
    """
    batch, layout = len(padding), site.layout
    buffers, table = site.buffers(batch)
    seen, pads = torch.zeros(batch, dtype=torch.long), torch.tensor(padding)
    for number, count in enumerate(chunks):
        k, v = (
            strided(vectors(seed + number + i, (batch, HKV, count, dim), site.dtype, size))
            for i, dim in enumerate(site.dims)
        )
        positions = new_positions(seen, count, pads)
        before, ours = ([x.clone() for x in buffers] for _ in range(2))
        one = count == 1
        spec = site.spec("append", *options(layout, one), block_n=heads if one else block_n)
        own_v = v if has_values(layout) else None
        assert append(None, k, own_v, ours, positions, [], None, table, spec.to_json()) == []
        reference_cache.append(k, v, buffers, positions, seen, layout, table)
        if layout.in_order and layout.in_full and not one:
            # After attention: queries of the pass may still read in full what its last tokens push out.
            spec = site.spec("append", "only_full", block_n=block_n)
            append(None, k, own_v, ours, positions, [], None, table, spec.to_json())
            reference_cache.append_residual(k, v, buffers, positions, seen, layout)
        check_same(site, ours, buffers, before, positions, table)
        pads = (pads - count).clamp(min=0)
        seen = positions[:, -1] + 1


DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(len(STORAGES)), ids=[str(storage) for storage in STORAGES])
def test_every_storage_is_written_as_the_reference_does(number: int) -> None:
    """As keys and as values, with dims that are a power of two and with others."""
    storage, dtype = STORAGES[number], DTYPES[number % 3]
    run(Site(CacheLayout(storage, storage), (16, 24), dtype), [6, 1], [0, 2], block_n=16)
    other = DTYPES[(number + 1) % 3]
    run(
        Site(CacheLayout(model_dtype(), storage, Ring(), SinkWindow(3, 6)), (8, 8), other),
        [10, 1],
        [4, 0],
        block_n=16,
    )


def test_what_only_the_rotation_makes_too_large_saturates() -> None:
    """Of a model in float16 all elements fit float16: a sum of them need not."""
    layout = CacheLayout(with_hadamard(float_dtype("float16")), with_hadamard(float_dtype("float16")))
    site = Site(layout, (16, 24), torch.float16)
    k, v = (torch.full((1, HKV, 3, d), 60000.0, dtype=torch.float16) for d in site.dims)
    (ours, _), (theirs, _) = site.buffers(1), site.buffers(1)
    positions = torch.arange(3)[None]
    append(None, k, v, ours, positions, [], None, None, site.spec("append").to_json())
    reference_cache.append(k, v, theirs, positions, torch.zeros(1, dtype=torch.long), layout)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and ours[0].max() == 65504.0


@pytest.mark.parametrize("placed", PLACED, ids=lambda placed: f"{placed[0]}-{placed[1]}")
def test_every_placement_is_written_as_the_reference_does(placed: tuple[Placement, Retention]) -> None:
    """Tokens in several tiles, of which some are all padding, and rings that go round within one call."""
    layout = CacheLayout(with_residual(int8(), 4, 2), uint(2), *placed)
    run(Site(layout, (8, 16)), [13, 1, 4], [0, 7])
    run(Site(layout, (8, 16)), [2, 5, 1], [0, 4])


@pytest.mark.parametrize(
    "storage", [with_residual(int8(), 4, 3), with_residual(int8(), 3), with_residual(int8(), 0, 4)], ids=str
)
@pytest.mark.parametrize("placed", PLACED, ids=lambda placed: f"{placed[0]}-{placed[1]}")
def test_every_row_is_written_once(placed: tuple[Placement, Retention], storage: Storage) -> None:
    """Programs run in any order on a GPU, and in one in the interpreter: it would not show that two write one row."""
    layout, side = CacheLayout(storage, storage, *placed), Side("keys", storage, 16)
    for last in range(1, 20):
        for start in range(max(last - 12, 0), last):
            pos = torch.arange(start, last + 1)
            among = {"pos": pos, "last": last, "real": torch.ones_like(pos, dtype=torch.bool)}
            slots_kept = pos[eval(slots.kept(layout, False), among)]
            found = evaluate(layout.address, {sy.pos: slots_kept}).tolist()
            assert len(set(found)) == len(found)
            assert set(found) == set(evaluate(layout.address, {sy.pos: pos}).tolist())
            in_full = pos[eval(str(append_residual.stays(side, False)), among)]
            rows = residual.row_of(storage, in_full).tolist()
            assert len(set(rows)) == len(rows)
            kept = pos[residual._held(storage, torch.tensor([last + 1]))[0].unsqueeze(1).eq(pos).any(0)]
            assert torch.equal(in_full, kept)


@settings(max_examples=12, deadline=None)
@given(
    keys=st.sampled_from([s for s in STORAGES if s.sinks <= 3]),
    values=st.sampled_from([*(s for s in STORAGES if s.sinks <= 3), InKeys(8)]),
    placed=st.sampled_from(PLACED),
    dims=st.sampled_from([(16, 8), (24, 16), (8, 40), (48, 16)]),
    dtype=st.sampled_from(DTYPES),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    padding=st.lists(st.integers(0, 9), min_size=1, max_size=2),
    size=st.sampled_from((1e-3, 1.0, 50.0)),
    heads=st.sampled_from((1, 2, 8)),
    seed=st.integers(0, 99),
)
def test_any_layout_and_chunks_are_written_as_the_reference_does(
    keys: Storage,
    values: Storage,
    placed: tuple[Placement, Retention],
    dims: tuple[int, int],
    dtype: torch.dtype,
    chunks: list[int],
    padding: list[int],
    size: float,
    heads: int,
    seed: int,
) -> None:
    layout = CacheLayout(keys, values, *placed)
    if layout.check() is not None:
        layout = replace(layout, placement=Contiguous(), retention=Full())
    run(Site(layout, dims, dtype), chunks, padding, seed, size, heads=heads)


MANY_HEADS = [
    (CacheLayout(int8(), with_residual(fp8("e4m3", "head"), 4, 1)), True),
    (CacheLayout(with_hadamard(uint(4, 8)), fp8("e5m2", "tensor"), Paged(8)), True),
    (CacheLayout(model_dtype(), nf4(8), Ring(), SinkWindow(3, 6)), False),
    (CacheLayout(with_residual(int8(), 3), InKeys(8), Paged(8), SinkWindow(3, 7)), True),
]


@pytest.mark.parametrize(("layout", "turns"), MANY_HEADS, ids=lambda x: str(x))
def test_programs_of_several_heads_write_what_those_of_one_do(layout: CacheLayout, turns: bool) -> None:
    """Also where heads are no multiple of what a program takes: bit for bit, and nothing else is touched."""
    form = RotaryForm("half", 4, 12)
    site = Site(layout, (16, 16 if has_values(layout) else 8), rotary=form if turns else None)
    one = site.spec("append", "one", "full", "q_out", "k_out", *(("rope",) if turns else ()), block_n=1)
    for queries, kv_heads in ((9, 3), (10, 5)):
        parts, pages = [], 3
        g = torch.Generator().manual_seed(3)
        for part in layout.buffers(kv_heads, *site.dims, site.dtype, 20):
            shape = (1 + 3 * pages if part.paged else 3, *part.shape)
            parts.append(torch.randint(1, 60, shape, generator=g).to(torch.float32).to(part.dtype))
        table = torch.arange(1, 1 + 3 * pages, dtype=torch.int32).view(3, pages)
        counts = ((queries, 16), (kv_heads, 16), (kv_heads, site.dims[1]))
        q, k, v = (strided(vectors(i, (3, h, 1, d), site.dtype)) for i, (h, d) in enumerate(counts))
        found = []
        for rows in (1, 2, 4, 8):
            spec = replace(one, num_qo_heads=queries, num_kv_heads=kv_heads, block_n=rows)
            ours = [x.clone() for x in parts]
            outs = append(
                q,
                k,
                v if has_values(layout) else None,
                ours,
                torch.tensor([[4], [-1], [17]]),
                tables(20, 12) if turns else [],
                None,
                table if isinstance(layout.placement, Paged) else None,
                spec.to_json(),
            )
            found.append([*outs, *ours])
            assert grid(spec, 3, 1)[1] == sum(-(-h // min(rows, block)) for h, block in _blocks(spec))
        for other in found[1:]:
            assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(found[0], other, strict=True))


def _blocks(spec: KernelSpec) -> list[tuple[int, int]]:
    """Heads of queries, of keys and of values, and what they are at most in a tile."""
    sides = [spec.num_kv_heads] * (1 + has_values(spec.layout))
    return [(heads, 1 << (heads - 1).bit_length()) for heads in (spec.num_qo_heads, *sides)]


def test_programs_are_of_several_heads_where_there_are_many() -> None:
    """At batch 256 an eighth as many programs; at batch 1 they are what they were. Of any number, as of many."""
    made = kernels_of(
        SiteSpec(CacheLayout(int8(), int8()), 1.0),
        (32, 8),
        (128, 128),
        torch.bfloat16,
        torch.device("cpu"),
        False,
    )
    wanted = {1: 48, 32: 48, 88: 48, 89: 6, 256: 6}
    with acting_as(H200):
        for sequences, programs in wanted.items():
            spec = made.appends(("one", "q_out"), sequences)
            assert grid(spec, sequences, 1) == (1, programs, sequences)
        assert warps(elements(made.appends(("one", "q_out"), 256))) == 2
        assert made.appends(("q_out",), 256) == made.appends(("q_out",), 1)
        sizes = ShapeEnv()
        symbol = sizes.create_unbacked_symint()
        assert made.appends(("one", "q_out"), symbol) == made.appends(("one", "q_out"), 256)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", cases(DTYPES, (torch.bfloat16,)), ids=str)
@pytest.mark.parametrize("storage", [mxfp4(), with_hadamard(mxfp4()), with_residual(mxfp4(), 3, 1)], ids=str)
def test_mxfp4(storage: Storage, dtype: torch.dtype) -> None:
    """Groups of 32 channels: of one group, of two, and of three, which is no power of two."""
    for dims in ((32, 64), (96, 32)):
        for size in (1.0, 1e-3, 1e3):
            run(Site(CacheLayout(storage, storage), dims, dtype), [5, 1, 7], [0, 2], size=size)


@pytest.mark.parametrize(
    "keys", [per_channel(2, 4, 8), with_hadamard(per_channel(4, 4, 4, "float16", 2))], ids=str
)
def test_of_groups_of_tokens_only_the_rows_in_full_are_written(keys: Storage) -> None:
    run(Site(CacheLayout(keys, uint(2)), (16, 8)), [6, 1, 3], [0, 2])


# ---- queries, RoPE, and what is handed on


def tables(count: int, dim: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(count, dim, generator=g) for _ in range(2)]


FORMS = [
    RotaryForm("half", 0, 16),
    RotaryForm("half", 0, 8),
    RotaryForm("half", 4, 12),
    RotaryForm("interleaved", 0, 16),
    RotaryForm("interleaved", 6, 10),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rope_is_done_first(form: RotaryForm, dtype: torch.dtype) -> None:
    """q and k turn at their positions, then as the storage turns; what is handed on is what is kept."""
    layout = CacheLayout(with_hadamard(int8()), model_dtype())
    site, pads = Site(layout, (16, 8), dtype, form), torch.tensor([0, 3])
    cos, sin = rope = tables(12, form.rotary_dim)
    for count in (5, 1):
        q, k, v = (
            strided(vectors(i, (2, heads, count, dim), dtype))
            for i, (heads, dim) in enumerate(((HQ, 16), (HKV, 16), (HKV, 8)))
        )
        positions = new_positions(
            torch.full((2,), 0 if count > 1 else 9), count, pads if count > 1 else pads * 0
        )
        buffers, _ = site.buffers(2)
        theirs, before = ([x.clone() for x in buffers] for _ in range(2))
        one = ("one",) if count == 1 else ()
        spec = site.spec("append", "rope", "q_out", "k_out", "v_out", *one, block_n=1 if one else 4)
        q_out, k_out, v_out = append(q, k, v, buffers, positions, rope, None, None, spec.to_json())
        turned_q, turned_k = (rotate(x, positions, cos, sin, form=form) for x in (q, k))
        reference_cache.append(turned_k, v, theirs, positions, positions[:, 0].clamp(min=0), layout)
        check_same(site, buffers, theirs, before, positions, None)
        wanted = codec.turned(layout.keys, turned_q)
        real = (positions >= 0)[:, None, :, None]
        assert q_out.dtype == (torch.float32 if one else dtype)
        assert torch.equal(q_out, torch.where(real, wanted, 0.0).to(q_out.dtype))
        assert torch.equal(k_out, torch.where(real, residual.in_basis(layout.keys, turned_k), 0.0).to(dtype))
        assert torch.equal(v_out, torch.where(real, v, 0.0).to(dtype))


def test_queries_turn_at_their_place_where_keys_are_kept_before_rope() -> None:
    """rope_q: keys are not touched; in a cache that counts positions, the place is one in the cache."""
    form = RotaryForm("half", 0, 16)
    cos, sin = rope = tables(20, 16)
    retention = SinkWindow(2, 6, "in_cache")
    layout = CacheLayout(with_hadamard(int8()), model_dtype(), Ring(), retention)
    for name, count, start in (("capped", 1, 5), ("capped", 1, 15), ("based", 4, 11), ("based", 6, 0)):
        site = Site(layout, (16, 8), rotary=form)
        q, k, v = (
            vectors(i, (2, h, count, d), torch.float32)
            for i, (h, d) in enumerate(((HQ, 16), (HKV, 16), (HKV, 8)))
        )
        positions = new_positions(torch.tensor([start, 0]), count, torch.tensor([0, 2 if count > 1 else 0]))
        buffers, _ = site.buffers(2)
        theirs, before = ([x.clone() for x in buffers] for _ in range(2))
        one = ("one",) if count == 1 else ()
        spec = site.spec("append", "rope_q", name, "q_out", *one)
        (q_out,) = append(q, k, v, buffers, positions, rope, None, None, spec.to_json())
        seen = positions[:, :1].clamp(min=0)
        place = positions.clamp(max=7) if name == "capped" else positions - (seen - 8).clamp(min=0)
        wanted = torch.where((positions >= 0)[:, None, :, None], rotate(q, place, cos, sin, form=form), 0.0)
        assert torch.equal(q_out, wanted)
        reference_cache.append(k, v, theirs, positions, seen[:, 0], layout)
        check_same(site, buffers, theirs, before, positions, None)


def test_new_tokens_that_are_kept_already_are_not_turned_again() -> None:
    """only_full with in_basis: the rows in full from what another launch has handed on."""
    layout = CacheLayout(with_hadamard(with_residual(int8(), 4, 1)), with_hadamard(with_residual(fp8(), 3)))
    site = Site(layout, (16, 24))
    k, v = (vectors(i, (1, HKV, 7, d), torch.float32) for i, d in enumerate(site.dims))
    positions = torch.arange(7)[None]
    (ours, _), (theirs, _) = site.buffers(1), site.buffers(1)
    spec = site.spec("append", "k_out", "v_out")
    k_out, v_out = append(None, k, v, ours, positions, [], None, None, spec.to_json())
    spec = site.spec("append", "only_full", "in_basis")
    append(None, k_out, v_out, ours, positions, [], None, None, spec.to_json())
    seen = torch.zeros(1, dtype=torch.long)
    reference_cache.append(k, v, theirs, positions, seen, layout)
    reference_cache.append_residual(k, v, theirs, positions, seen, layout)
    assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("placed", PLACED, ids=lambda placed: f"{placed[0]}-{placed[1]}")
def test_staged_tokens_stand_at_their_place_in_the_call(placed: tuple[Placement, Retention]) -> None:
    """Whatever the layout's own slots: an array of the call's tokens, all of them, without pages."""
    layout = CacheLayout(with_residual(int8(), 2), with_hadamard(uint(4, 8)), *placed)
    site, count = Site(layout, (16, 8)), 9
    k, v = (vectors(i, (2, HKV, count, d), torch.float32) for i, d in enumerate(site.dims))
    positions = new_positions(torch.tensor([20, 0]), count, torch.tensor([0, 2]))
    as_staged = CacheLayout(int8(), with_hadamard(uint(4, 8)))
    buffers, _ = Site(as_staged, (16, 8), limit=count).buffers(2)
    rows = [torch.empty(2, HKV, 2, 16)]
    spec = site.spec("append", "staged")
    append(None, k, v, [*buffers[:2], *rows, *buffers[2:]], positions, [], None, None, spec.to_json())
    wanted = [*codec.encode(int8(), k), *codec.encode(as_staged.values, v)]
    real = positions >= 0
    for mine, other in zip(buffers, wanted, strict=True):
        shown = real[:, None, :].expand(-1, HKV, -1)
        assert torch.equal(mine[shown], other[shown])


# ---- slots that scores choose


@pytest.mark.parametrize("granularity", ["kv_head", "layer"])
@pytest.mark.parametrize("placement", [Slots(), Paged(8)], ids=str)
def test_scored_layouts_write_to_the_slots_that_are_given(placement: Placement, granularity: str) -> None:
    """Of many tokens, -1 and padding: nowhere. KV heads have slots of their own, or the same."""
    layout = CacheLayout(
        with_residual(int8(), 2), uint(4), placement, Scored(1, 6, 3, granularity=granularity)
    )
    site, g = Site(layout, (16, 8)), torch.Generator().manual_seed(1)
    heads = HKV if granularity == "kv_head" else 1
    count = 6
    k, v = (vectors(i, (2, HKV, count, d), torch.float32) for i, d in enumerate(site.dims))
    positions = new_positions(torch.tensor([20, 0]), count, torch.tensor([0, 2]))
    places = torch.stack([torch.randperm(10, generator=g)[:count] for _ in range(2 * heads)])
    places = places.view(2, heads, count).to(torch.int32)
    places[0, :, 2] = -1
    ours, table = site.buffers(2)
    theirs = [x.clone() for x in ours]
    spec = site.spec("append", "full")
    append(None, k, v, ours, positions, [], places, table, spec.to_json())
    x = {"keys": (k, layout.keys), "values": (v, layout.values)}
    for name, buffer in zip(names(layout, site)[:-2], theirs[:-2], strict=True):
        vector, storage = x[name.split(".")[0]]
        own = [part.name for part in storage.parts(8, torch.float32)].index(name.split(".")[1])
        if name.endswith("full"):
            residual.append(storage, vector, [buffer], positions, positions[:, 0].clamp(min=0))
            continue
        encoded = residual.settled(storage, vector, [buffer], positions)[1][own]
        for b, h, s in itertools.product(range(2), range(HKV), range(count)):
            slot = int(places[b, min(h, heads - 1), s])
            if slot >= 0 and positions[b, s] >= 0:
                at = (b, h, slot) if table is None else (int(table[b, slot // 8]), h, slot % 8)
                buffer[at] = encoded[b, h, s]
    for name, a, b in zip(names(layout, site), ours, theirs, strict=True):
        assert torch.equal(as_bits(a), as_bits(b)), name


def test_tiles_hold_fewer_tokens_of_wide_vectors() -> None:
    assert [block_n(d, 64, False) for d in (16, 64, 128, 192, 576)] == [32, 32, 16, 8, 2]
    assert block_n(128, 128, True) == 1


def test_tiles_hold_fewer_heads_of_wide_vectors() -> None:
    assert [heads(d, 64) for d in (16, 64, 128, 192, 576)] == [8, 8, 8, 4, 1]


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="append knows no options \\['no_such'\\]"):
        generate(Site(CacheLayout()).spec("append", "no_such"))


def test_layouts_that_no_kernel_writes_are_refused_with_the_reason() -> None:
    layout = CacheLayout(with_residual(uint(4, 24), 2))
    reason = "keys: int4/g24 has groups of 24 channels, .* use group 16, or 0 for the whole head"
    assert re.search(reason, str(unsupported(layout, torch.float32)))
    with pytest.raises(ValueError, match=reason):
        generate(Site(layout, (48, 48)).spec("append"))
    assert "not in torch.float64" in str(unsupported(CacheLayout(), torch.float64))
    for storage in STORAGES:
        assert unsupported(CacheLayout(storage, storage), torch.bfloat16) is None
