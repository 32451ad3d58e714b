"""Pieces of vectors, and the bounds of attention loops, against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.dead_lines import tidy
from kvcompile.kernels.triton.host.call import most_read
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import block_bounds
from kvcompile.kernels.triton.tile.channel_blocks import (
    SMALLEST,
    ChannelBlock,
    between,
    in_pairs,
    paired,
    split,
)
from kvcompile.layouts import CacheLayout, Full, SinkWindow, Window, int8, per_channel, uint, with_residual
from kvcompile.specs import MaskSpec

# ---- pieces


def channels(pieces: tuple[ChannelBlock, ...]) -> list[int]:
    return [piece.start + piece.step * i for piece in pieces for i in range(piece.width)]


@given(dim=st.integers(1, 600), edges=st.lists(st.integers(-5, 700), max_size=6))
def test_pieces_hold_every_channel_once_and_cross_no_edge(dim: int, edges: list[int]) -> None:
    pieces = between(dim, edges)
    assert channels(pieces) == list(range(dim))
    for piece in pieces:
        assert not any(piece.start < edge < piece.stop for edge in edges)
        assert piece.block >= max(piece.width, SMALLEST) and piece.block.bit_count() == 1
        assert piece.whole == (piece.block == piece.width)
        # Only what two of the narrowest blocks could hold is padded, in one that has no more columns.
        assert piece.whole or piece.width < 2 * SMALLEST


@given(
    start=st.integers(0, 100),
    half=st.integers(1, 80),
    more=st.integers(0, 100),
    interleaved=st.booleans(),
)
def test_channels_that_turn_together_stand_in_neighbouring_pieces(
    start: int, half: int, more: int, interleaved: bool
) -> None:
    pieces = in_pairs(start + 2 * half + more, start, 2 * half, interleaved)
    assert sorted(channels(pieces)) == list(range(start + 2 * half + more))
    pairs = set()
    count = paired(2 * half)
    for a, b in zip(pieces[:count:2], pieces[1:count:2], strict=True):
        pairs |= set(zip(channels((a,)), channels((b,)), strict=True))
    step, apart = (2, 1) if interleaved else (1, half)
    assert pairs == {(start + step * i, start + step * i + apart) for i in range(half)}
    assert not any(start <= channel < start + 2 * half for channel in channels(pieces[count:]))


def test_pieces_of_real_heads() -> None:
    def widths(pieces: list[ChannelBlock]) -> list[int]:
        return [piece.width for piece in pieces]

    assert widths(split(0, 128)) == [128] and widths(split(0, 576)) == [512, 64]
    assert widths(split(0, 80)) == [64, 16] and widths(split(0, 20)) == [20]
    assert ChannelBlock(16, 4).block == SMALLEST and not ChannelBlock(16, 4).whole


# ---- lines that nothing reads


def test_lines_that_nothing_reads_go() -> None:
    text = "def f(x):\n    a = x\n    b = a\n    x = x\n    c = 1\n    # what is returned\n    return c + x\n"
    assert tidy(text) == "def f(x):\n    c = 1\n    # what is returned\n    return c + x\n"
    kept = "def f(x):\n    a = tl.atomic_add(x, 1)\n    b, c = x\n    x += 1\n    tl.store(x, b)\n"
    assert tidy(kept) == kept


# ---- bounds


class Int(int):
    """Division as on a GPU, where it truncates, instead of down."""

    def __floordiv__(self, other: int) -> Int:
        quotient = abs(int(self)) // abs(int(other))
        return Int(quotient if (self < 0) == (other < 0) else -quotient)

    def __mod__(self, other: int) -> Int:
        return Int(int(self) - int(self // other) * int(other))


def _of_int(name: str) -> Callable[..., Int]:
    method = getattr(int, name)
    return lambda *args: Int(method(*args))


for _name in ("__add__", "__sub__", "__mul__", "__neg__", "__radd__", "__rsub__", "__rmul__"):
    setattr(Int, _name, _of_int(_name))


class Language:
    """What of `triton.language` the bounds use."""

    def __init__(self, kind: type[int]) -> None:
        self.kind = kind

    def maximum(self, a: int, b: int) -> int:
        return self.kind(max(a, b))

    def minimum(self, a: int, b: int) -> int:
        return self.kind(min(a, b))


def evaluated(bounds: block_bounds.Bounds, names: dict[str, int], kind: type[int]) -> dict[str, Any]:
    found: dict[str, Any] = {name: kind(value) for name, value in names.items()}
    exec("\n".join(bounds.lines), {"tl": Language(kind)}, found)
    return found


def spec(layout: CacheLayout, mask: MaskSpec, block: int) -> KernelSpec:
    return KernelSpec("prefill", SiteSpec(layout, 1.0, mask), 2, 1, 16, 16, "float32", 16, block)


LAYOUTS = (
    CacheLayout(),
    CacheLayout(retention=Window(5)),
    CacheLayout(retention=SinkWindow(3, 6)),
    CacheLayout(retention=SinkWindow(9, 2)),
    CacheLayout(with_residual(int8(), 4), int8()),
    CacheLayout(with_residual(int8(), 3, sinks=2), per_channel(4, 4, 8, sinks=3)),
    CacheLayout(with_residual(uint(4), 0, sinks=5), int8()),
    CacheLayout(with_residual(int8(), 3, sinks=1), int8(), retention=SinkWindow(3, 6)),
)
MASKS = (MaskSpec("causal"), MaskSpec("sliding", 7), MaskSpec("chunked", 8))


def visible(layout: CacheLayout, mask: MaskSpec, query: int, key: int) -> bool:
    retention = layout.retention
    found = 0 <= key <= query
    if mask.window is not None:
        ours = key > query - mask.window
        found &= key // mask.window == query // mask.window if mask.kind == "chunked" else ours
    if retention.window is not None:
        found &= key > query - retention.window or key < retention.sinks
    return found


def in_full(layout: CacheLayout, query: int, key: int) -> bool:
    """Whether a query reads a key or a value from the rows in full."""
    for storage in (layout.keys, layout.values):
        length = query + 1
        newest = length - storage.residual if not storage.channelwise else length // 8 * 8
        if key < storage.sinks or (storage.residual and key >= newest):
            return True
    return False


@pytest.mark.parametrize("kind", [int, Int], ids=["down", "truncating"])
@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    mask=st.sampled_from(MASKS),
    block=st.sampled_from((4, 8, 16)),
    first=st.integers(-9, 40),
    near=st.integers(0, 12),
    rows=st.integers(1, 9),
    new=st.booleans(),
)
def test_every_key_that_is_seen_is_visited_once(
    kind: type[int],
    layout: CacheLayout,
    mask: MaskSpec,
    block: int,
    first: int,
    near: int,
    rows: int,
    new: bool,
) -> None:
    """Tiles of slots, or of new tokens: none twice, none with a token that is not there, plain ones wholly seen."""
    tokens = near + rows + 2
    full = layout.residual or max(layout.keys.sinks, layout.values.sinks)
    # The queries of a tile, some of which may be padding; positions of slots, which new tokens begin with.
    names = {"near": first + near, "far": first + near + rows - 1, "first": first, "tokens": tokens}
    asked = spec(layout, mask, block)
    limits = ("first", "tokens") if new else ("0", "")
    bounds = block_bounds.ordered(asked, *limits, full=bool(full))
    found = evaluated(bounds, names, kind)
    origin = first if new else 0
    sinks = found.get("sink_tiles", 0)
    shift = found.get("shift", 0)
    tiles = [tile if bounds.sinks and tile < sinks else tile + shift for tile in range(found["tiles"])]
    assert len(set(tiles)) == len(tiles) and all(tile >= 0 for tile in tiles)
    queries = [q for q in range(names["near"], names["far"] + 1) if q >= 0]
    visited = {tile * block + n for tile in tiles for n in range(block)}
    for query in queries:
        for key in range(max(origin, 0), min(query, origin + tokens - 1 if new else query) + 1):
            if visible(layout, mask, query, key):
                assert key - origin in visited and key - origin < found["end"]
    for tile in range(max(found["plain_from"], 0), min(found["plain_to"], found["tiles"])):
        start = (tile + shift) * block
        for query, slot in itertools.product(
            range(names["near"], names["far"] + 1), range(start, start + block)
        ):
            assert slot < found["end"] and visible(layout, mask, query, origin + slot)
            assert not (full and in_full(layout, query, origin + slot))


def test_long_caches_are_mostly_plain() -> None:
    """Bounds that were right but too wide would make every tile a masked one."""
    for layout, mask, wanted in (
        (CacheLayout(), MaskSpec("causal"), (250, 256)),
        (CacheLayout(retention=SinkWindow(4, 508)), MaskSpec("causal"), (30, 34)),
        (CacheLayout(), MaskSpec("sliding", 512), (30, 33)),
        (CacheLayout(with_residual(int8(), 64), int8()), MaskSpec("causal"), (250, 256)),
        (CacheLayout(retention=Full()), MaskSpec("chunked", 1024), (60, 65)),
    ):
        bounds = block_bounds.ordered(spec(layout, mask, 16), "0", "", full=bool(layout.residual))
        found = evaluated(bounds, {"near": 4095, "far": 4095}, int)
        plain, most = found["plain_to"] - found["plain_from"], found["tiles"]
        assert wanted[0] <= plain <= most <= wanted[1], (layout, mask, plain, most)


@pytest.mark.parametrize("held", [0, 1, 15, 16, 17, 40])
def test_slots_in_any_order_are_visited_up_to_what_they_hold(held: int) -> None:
    found = evaluated(
        block_bounds.unordered(spec(CacheLayout(), MASKS[0], 16), "held", True), {"held": held}, int
    )
    assert found["end"] == held and found["tiles"] == -(-held // 16)
    assert (found["plain_from"], found["plain_to"]) == (0, held // 16)


@given(
    layout=st.sampled_from([layout for layout in LAYOUTS if not layout.residual]),
    mask=st.sampled_from(MASKS),
    block=st.sampled_from((4, 8, 16)),
    query=st.integers(0, 300),
)
def test_a_step_is_shared_out_over_the_tiles_that_it_reads(
    layout: CacheLayout, mask: MaskSpec, block: int, query: int
) -> None:
    """However many slots there are; and over little more than these."""
    asked = spec(layout, mask, block)
    bounds = block_bounds.ordered(asked, "0", "", full=False)
    tiles = evaluated(bounds, {"near": query, "far": query}, int)["tiles"]
    most = most_read(asked.site, 400, block)
    assert tiles <= -(-most // block)
    windowed = layout.retention.window is not None or mask.window is not None
    assert most == 400 if not windowed else most <= 9 + 8 + 2 * block
