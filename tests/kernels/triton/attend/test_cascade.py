"""What sequences have in common is read once: who is in a bundle, each tile of each sequence once, and numbers.

Tables are compared by the kernel that appends, tiles are taken by the one that attends; the op itself says nothing of
either, so whole steps are held against the same step in which each sequence reads its own, and against the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.append import common_pages
from kvcompile.kernels.triton.attend import cascade, work_list
from kvcompile.kernels.triton.device import acting_as
from kvcompile.kernels.triton.host import ops_attend, ops_write
from kvcompile.kernels.triton.host.launches import launches
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.layouts import (
    CacheLayout,
    InKeys,
    Paged,
    SinkWindow,
    TopPages,
    Window,
    fp8,
    int8,
    nf4,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from tests.support.budget import within
from tests.support.generated import forgotten
from tests.support.kernel_specs import DEVICES
from tests.support.runner import known, run, shuffled
from tests.support.triton_attention import H2O, STORAGES, Case, oracle
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
TILE = 16  # slots, as the interpreter's kernels have them
LEAST = 8  # less than a tile
# To shrink what fails takes minutes in the interpreter.
UNSHRUNK = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that make bundles of short prefixes, and compare few pages in a turn."""
    monkeypatch.setattr(common_pages, "LEAST", LEAST)
    monkeypatch.setattr(common_pages, "_AT_ONCE", 4)
    with forgotten():
        yield


# ---- who is in a bundle


def bundles(tables: Sequence[Sequence[int]], newest: Sequence[int], size: int, most: int) -> list[list[int]]:
    """`prefixes`, by loops over tables."""
    same = [0] * len(tables)
    for row in range(1, len(tables)):
        for entry in range(max(0, min(newest[row - 1 : row + 1])) // size if row % most else 0):
            if tables[row][entry] != tables[row - 1][entry]:
                break
            same[row] += size
    found: list[list[int]] = []
    for start in range(0, len(tables), most):
        rows = range(start, min(start + most, len(tables)))
        own: list[list[int]] = []
        for row in rows:
            beside = max((same[other] for other in (row - 1, row + 1) if other in rows), default=0)
            if row == start or same[row] < LEAST or 2 * same[row] < beside:
                own.append([])
            own[-1].append(row)
        for bundle in own:
            common = min((same[row] for row in bundle[1:]), default=0)
            for place in range(len(bundle)):
                found.append([common if place else 0, 0 if place else common, place, len(bundle)])
    return found


def compared(table: Tensor, newest: Tensor, size: int, group: int) -> Tensor:
    """`prefixes`, by an append of one token."""
    layout = CacheLayout(placement=Paged(size))
    made = kernels_of(SiteSpec(layout, 1.0), (group, 1), (16, 16), torch.float32, torch.device("cpu"), False)
    batch = table.shape[0]
    pool = torch.zeros(int(table.max()) + 1, 1, size, 16)
    vectors = torch.zeros(batch, 1, 1, 16)
    found: list[Tensor] = ops_write.append(
        None,
        vectors,
        vectors,
        [pool, pool.clone()],
        newest[:, None],
        [],
        None,
        table,
        made.appends(("one", "prefixes")).to_json(),
    )
    (prefixes,) = found
    return prefixes


def test_a_bundle_has_in_common_what_all_of_it_have() -> None:
    """The third has less of it than the first two, and more than half: it is no other bundle."""
    size, table = 4, torch.arange(1, 28, dtype=torch.int32).view(3, 9)
    table[1, :8] = table[0, :8]
    table[2, :5] = table[1, :5]
    newest = torch.full((3,), 9 * size - 1)
    wanted = bundles(table.tolist(), newest.tolist(), size, 4)
    assert wanted == [[0, 5 * size, 0, 3], [5 * size, 0, 1, 3], [5 * size, 0, 2, 3]]
    assert compared(table, newest, size, 4).tolist() == wanted


@settings(UNSHRUNK, max_examples=20)
@given(st.data(), st.integers(1, 11), st.sampled_from((1, 4, 8, 3)), st.sampled_from((4, 8, 16)))
def test_who_is_in_a_bundle(data: st.DataObject, batch: int, group: int, size: int) -> None:
    """Against loops: tables that begin alike, for any number of pages, and differ anywhere."""
    pages = 9
    table = torch.arange(1, batch * pages + 1, dtype=torch.int32).view(batch, pages)
    for row in range(1, batch):
        alike = data.draw(st.sampled_from((0, 1, 2, 4, 5, 8, 9)), label="pages alike")
        table[row, :alike] = table[row - 1, :alike]
        if alike and data.draw(st.integers(0, 3)) == 0:  # alike again behind one that is not
            table[row, data.draw(st.integers(0, alike - 1))] = 0
    newest = [data.draw(st.integers(-1, pages * size - 1), label="newest") for _ in range(batch)]
    most = min(16, 1 << (max(16 // group, 1).bit_length() - 1))
    wanted = bundles(table.tolist(), newest, size, most)
    assert compared(table, torch.tensor(newest), size, group).tolist() == wanted


# ---- each tile once


HEADS, GROUP, CHANNELS, MOST = 2, 4, 16, 8
SLOTS = TILE * MOST


@cache
def listed(*more: str) -> str:
    layout = CacheLayout(placement=Paged(TILE))
    made = kernels_of(
        SiteSpec(layout, 1.0),
        (GROUP * HEADS, HEADS),
        (16, CHANNELS),
        torch.float32,
        torch.device("cpu"),
        False,
    )
    spec = made.spec("decode", ("listed", "cascade", *more))
    assert spec.block_n == TILE and cascade.most(spec) == 4
    return spec.to_json()


# How long a sequence is, and how many of its pages are those of the one before.
SEQUENCES = st.tuples(st.sampled_from((0, 1, 16, 17, 48, 100, 127, 128)), st.sampled_from((0, 0, 1, 3, 7)))


@settings(UNSHRUNK, max_examples=10)
@given(st.lists(SEQUENCES, min_size=1, max_size=5), st.integers(1, 16))
@example([(128, 0), (128, 7), (100, 7), (17, 0)], 5)
@example([(127, 0), (128, 3), (128, 3), (128, 3), (48, 3)], 16)
def test_every_tile_of_every_sequence_is_taken_once(sequences: list[tuple[int, int]], programs: int) -> None:
    covers(sequences, programs)


@pytest.mark.slow
@settings(UNSHRUNK, max_examples=50)
@given(st.lists(SEQUENCES, min_size=1, max_size=10), st.integers(1, 40))
def test_every_tile_of_more_sequences_is_taken_once(sequences: list[tuple[int, int]], programs: int) -> None:
    covers(sequences, programs)


def covers(sequences: list[tuple[int, int]], programs: int) -> None:
    """Programs take equally many tiles; all keys weigh alike, and the value of a token is the number of its tile."""
    batch, lengths = len(sequences), [length for length, _ in sequences]
    table = torch.arange(1, batch * MOST + 1, dtype=torch.int32).view(batch, MOST)
    for row in range(1, batch):
        alike = sequences[row][1]
        table[row, :alike] = table[row - 1, :alike]
    newest = torch.tensor(lengths) - 1
    prefixes = torch.tensor(bundles(table.tolist(), newest.tolist(), TILE, 4), dtype=torch.int32)
    pool = torch.full((batch * MOST + 1, HEADS, TILE, CHANNELS), float("nan"))
    for row in range(batch):
        for tile in range(-(-lengths[row] // TILE)):
            pool[table[row, tile]] = torch.eye(CHANNELS)[tile]
    keys = torch.zeros(batch * MOST + 1, HEADS, TILE, 16)
    q = torch.zeros(batch, GROUP * HEADS, 1, 16)

    def run(*more: str, arrivals: Tensor | None = None) -> list[Tensor]:
        return list(
            ops_attend.decode(
                q,
                [keys, pool],
                newest[:, None],
                None,
                [],
                [],
                table,
                None,
                None,
                None,
                None,
                arrivals,
                None,
                programs,
                1,
                1,
                listed(*more),
                prefixes,
            )
        )

    partial, sums, spans = run()
    assert partial.shape[:2] == (programs + 2 * HEADS * batch, 16)
    took, taken = torch.zeros(programs), torch.zeros(partial.shape[0], dtype=torch.bool)
    for row, length in enumerate(lengths):
        expected = (torch.arange(SLOTS) < length).view(MOST, TILE).sum(1).float()
        skipped, common, place, _ = prefixes[row].tolist()
        for head in range(HEADS if length else 0):
            found = torch.zeros(GROUP, MOST)
            for kind, (whose, at) in enumerate(((row - place, place), (row, 0))):
                if kind == 0 and not skipped + common >= TILE:
                    continue
                first, count = spans[whose, 2 * head + kind].tolist()
                assert count > 0
                for number in range(first, first + count):
                    own = partial[number, at * GROUP : (at + 1) * GROUP, :MOST]
                    assert torch.equal(sums[number, at * GROUP : (at + 1) * GROUP, 1], own.sum(-1))
                    found += own
                    if kind or not place:
                        assert not taken[number], "a part of two segments"
                        taken[number] = True
                        took[number - 2 * (HEADS * whose + head) - kind] += (own[0] > 0).sum()
            assert torch.equal(found, expected.expand(GROUP, -1)), "each tile once"
    tiles = [-(-length // TILE) for length in lengths]
    read = HEADS * (sum(tiles) - int((prefixes[:, 0] // TILE).sum()))
    share = math.ceil(read / programs)
    assert took.tolist() == [max(0, min(share, read - share * program)) for program in range(programs)]
    # The last program of each head joins its parts, and all tiles have been counted.
    arrivals = torch.zeros(batch, GROUP * HEADS, dtype=torch.int32)
    (out,) = run("joined", arrivals=arrivals)
    for row, length in enumerate(lengths):
        weights = (torch.arange(SLOTS) < length).view(MOST, TILE).sum(1) / max(length, 1)
        torch.testing.assert_close(out[row, :, 0, :MOST], weights.expand(GROUP * HEADS, -1))
        assert arrivals[row].tolist() == [tiles[row]] * HEADS + [0] * (GROUP - 1) * HEADS


# ---- numbers


@dataclass(frozen=True)
class Alike(Case):
    """Sequences of which some begin as the one before: `alike[b]` tokens."""

    alike: tuple[int, ...] = ()

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv()
        for row, tokens in enumerate(self.alike):
            here, before = (slice(pad, pad + tokens) for pad in (self.pads[row], self.pads[row - 1]))
            for x in (k, v):
                x[row, :, here] = x[row - 1, :, before]
        return q, k, v


@dataclass(frozen=True)
class Stepped:
    """A step: its result [B, Hq, 1, Dv], the buffers after it, and what sequences had in common, if anyone asked."""

    out: Tensor
    buffers: list[Tensor]
    prefixes: Tensor | None


def step(case: Alike, kernels: str = "triton", share: str = "none") -> Stepped:
    """The last token of a cache that the reference has filled, where sequences have full pages in common."""
    layout, (q, k, v) = case.layout, case.qkv()
    pads, before = torch.tensor(case.pads), case.total - 1
    extra = {
        "scales": case.scales(),
        "unwritten": float("nan") if kernels == "triton" else 77.0,
        **case.extra(),
    }
    own = [x[:, :, :before] for x in (q, k, v)]
    site = replace(case.site, kernels="reference")
    filled = run(site, own, case.chunks[:-1], pads, case.rope(), **extra)
    assert isinstance(layout.placement, Paged)
    size = layout.placement.page_size
    seen = before - pads
    table = known(layout, shuffled(layout, len(pads), before + 2), seen, seen + 1)
    for row, tokens in enumerate(case.alike):
        table[row, : tokens // size] = table[row - 1, : tokens // size]
    found: list[Tensor | None] = []
    plain = ops_attend.decode

    def noted(*arguments: Any) -> list[Tensor]:
        found.append(arguments[-1])
        return plain(*arguments)  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ops_attend, "decode", noted)
        out = ops.cached_attention(
            *(x[:, :, before:] for x in (q, k, v)),
            filled.buffers,
            seen[:, None],
            seen,
            case.rope(),
            case.total,
            replace(site, kernels=kernels, share=share).to_json(),
            page_table=table,
            **case.extra(),
        )
    return Stepped(out, filled.buffers, found[0] if found else None)


def check(case: Alike) -> Stepped:
    """A step in bundles, against the oracle, the same step with each sequence alone, and the reference."""
    together, same = step(case), step(case, "reference")
    with cascade.alone():
        apart = step(case)
    assert apart.prefixes is None
    for one, other in zip(together.buffers, apart.buffers, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    wanted = oracle(case, [])[0][:, :, -1:]
    for found in (together, apart):
        within(found.out, same.out, wanted, case.dtype, few=True)
    if together.prefixes is not None and not together.prefixes[:, 0].any():
        assert torch.equal(together.out, apart.out), "where nothing is in common, no bit is another"
    return together


LONG = {"chunks": (60, 1), "pads": (0, 0, 2, 0, 0, 5)}
TALKS = (0, 48, 32, 48, 0, 50)
PAGED = {
    "plain": Alike(CacheLayout(placement=Paged(16)), (8, 2)),
    "pages of half a tile": Alike(CacheLayout(int8(), int8(), Paged(8)), (4, 2), score=ScoreSpec(4.0)),
    "pages of several tiles": Alike(
        CacheLayout(fp8(), int8(), Paged(32)), (6, 2), score=ScoreSpec(sinks=True)
    ),
    "pages across tiles": Alike(CacheLayout(uint(8), fp8(scale="head"), Paged(24)), (4, 1), (16, 24)),
    "codebooks": Alike(CacheLayout(nf4(), with_hadamard(int8()), Paged(16)), (4, 2), (32, 48)),
    "groups of channels": Alike(CacheLayout(uint(4, 8), uint(4, 8), Paged(16)), (2, 2)),
    "latent": Alike(CacheLayout(int8(), InKeys(16), Paged(16)), (4, 1), (48, 16)),
    "turned": Alike(CacheLayout(with_hadamard(uint(4)), with_hadamard(uint(4)), Paged(16)), (3, 1)),
    "RoPE": Alike(CacheLayout(placement=Paged(16)), (4, 2), rotary=RotaryForm("half", 0, 16)),
    "before RoPE": Alike(
        CacheLayout(int8(), int8(), Paged(16), before_rope=True), rotary=RotaryForm("interleaved", 8, 8)
    ),
    "bfloat16": Alike(CacheLayout(placement=Paged(16)), (4, 2), dtype=torch.bfloat16),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("apart", [False, True], ids=["joined by the last", "joined apart"])
@pytest.mark.parametrize("name", PAGED)
def test_sequences_that_begin_alike(name: str, apart: bool) -> None:
    with work_list.joined_apart() if apart else nullcontext():
        found = check(replace(PAGED[name], alike=TALKS, **LONG))
    assert found.prefixes is not None and (found.prefixes[:, 0] >= TILE).sum() >= 2


@pytest.mark.parametrize("apart", [False, True], ids=["joined by the last", "joined apart"])
def test_sequences_of_which_none_begins_as_another(apart: bool) -> None:
    with work_list.joined_apart() if apart else nullcontext():
        found = check(Alike(PAGED["plain"].layout, (4, 1), alike=(0,) * 6, **LONG))
    assert found.prefixes is not None and not found.prefixes[:, :3].any()


@st.composite
def alike(draw: st.DrawFn) -> Alike:
    """Any storages in any pages, and any sequences of which neighbours begin alike."""
    stored = [s for s in STORAGES if not (s.channelwise or s.residual or s.sinks)]
    dim = draw(st.sampled_from((16, 32, 48)))
    kept = [s for s in stored if not s.check(dim)]
    batch, total = draw(st.integers(2, 9)), draw(st.sampled_from((18, 33, 60)))
    pads = tuple(draw(st.sampled_from((0, 0, 0, 1, 7, total))) for _ in range(batch))
    pads = pads if min(pads) < total else (0, *pads[1:])
    lengths = [total - pad for pad in pads]
    tokens = [0]
    for row in range(1, batch):
        most = max(0, min(lengths[row - 1], lengths[row]) - 1)
        tokens.append(draw(st.sampled_from((0, most, most, most // 2, most // 3))))
    heads = draw(st.sampled_from((1, 2)))
    return Alike(
        CacheLayout(
            draw(st.sampled_from(kept)),
            draw(st.sampled_from(kept)),
            Paged(draw(st.sampled_from((8, 16, 24, 32)))),
        ),
        (draw(st.sampled_from((1, 2, 3, 4, 5, 8))) * heads, heads),
        (dim, dim),
        draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16))),
        score=ScoreSpec(draw(st.sampled_from((None, 4.0))), None, draw(st.booleans())),
        chunks=(total - 1, 1),
        pads=pads,
        seed=draw(st.integers(0, 999)),
        alike=tuple(tokens),
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(UNSHRUNK, max_examples=60)
@given(alike())
def test_any_storage_in_any_batch(case: Alike) -> None:
    check(case)


# ---- what has none


WINDOWS = Paged(16, released=True)
ALONE = {
    "not in pages": (Case(CacheLayout()), "their slots are not in pages"),
    "window": (
        Case(CacheLayout(placement=Paged(16)), mask=MaskSpec("sliding", 9)),
        "a window begins where its query says",
    ),
    "released": (Case(CacheLayout(placement=WINDOWS, retention=Window(20))), "its own matter: window"),
    "sinks and window": (
        Case(CacheLayout(placement=Paged(16), retention=SinkWindow(4, 12))),
        "its own matter: sink",
    ),
    "scored": (Case(CacheLayout(placement=Paged(16), retention=H2O)), "its own matter: h2o"),
    "chosen pages": (
        Case(CacheLayout(placement=Paged(16), selection=TopPages(16, 2))),
        "chooses the pages",
    ),
    "in full": (
        Case(CacheLayout(with_residual(int8(), 5), int8(), Paged(16))),
        "stand in full beside the pages",
    ),
    "ALiBi": (
        Case(CacheLayout(placement=Paged(16)), score=ScoreSpec(bias=BiasSpec("alibi"))),
        "scores depend on where a query is",
    ),
}


def options_of(case: Case, share: str = "none") -> dict[str, tuple[str, ...]]:
    """Of each role of a step, the options of its kernel."""
    site = replace(case.site, share=share)
    found = launches(site, case.heads, case.dims, torch.bfloat16, DEVICES[90])
    return {one.spec.role: one.spec.options for one in found}


@pytest.mark.parametrize("name", ALONE)
def test_layouts_in_which_nothing_is_in_common(name: str) -> None:
    """They are refused by a list that says why, and run the kernels that know nothing of it."""
    case, said = ALONE[name]
    reason = cascade.refusal(case.site)
    assert reason is not None and said in reason
    options = options_of(case)
    assert "cascade" not in options["decode"] and "prefixes" not in options["append"]


def test_rows_that_are_taken() -> None:
    """By the query heads of a group, or by the groups of channels: then there is no room for another sequence."""
    plain, int4 = CacheLayout(placement=Paged(64)), CacheLayout(uint(4, 32), uint(4, 32), Paged(64))
    for layout, heads, dims, most in (
        (plain, (32, 8), 128, 4),
        (plain, (8, 8), 128, 16),
        (plain, (24, 8), 128, 4),
        (plain, (64, 8), 128, 2),
        (plain, (16, 1), 128, 1),
        (int4, (32, 8), 128, 1),
        (int4, (8, 8), 128, 4),
    ):
        case = Case(layout, heads, (dims, dims))
        made = kernels_of(case.site, heads, case.dims, torch.bfloat16, torch.device("cpu"), False)
        with acting_as(DEVICES[90]):
            assert cascade.most(made.spec("decode")) == most, (layout, heads)
        assert ("cascade" in options_of(case)["decode"]) == (most > 1)


def test_the_sites_that_share_a_cache() -> None:
    """The first writes the new tokens and compares tables; the others attend to what it has written."""
    case = PAGED["plain"]
    assert "cascade" in options_of(case, "first")["decode"]
    for share in ("middle", "last"):
        assert "cascade" not in options_of(case, share)["decode"]
    once = replace(case, alike=TALKS, **LONG)
    assert torch.equal(step(once, share="first").out, step(once).out)


def test_one_sequence_compares_nothing() -> None:
    case = Alike(PAGED["plain"].layout, (4, 1), chunks=(60, 1), pads=(0,), alike=(0,))
    assert step(case).prefixes is None
