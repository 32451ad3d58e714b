"""What ties say of cuts against what PyTorch does: any cut, forwards and backwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.passes.shard.cuts import Cut, Indices, blocks, covering, cut_of, repeated
from kvcompile.passes.shard.ties import Regroup, Repeat, Slice, regrouped, strided


@st.composite
def parts(draw: st.DrawFn, size: int, ranks: int = 2) -> list[Indices]:
    """For each rank some indices in order, or not in order."""
    found = []
    for _ in range(ranks):
        own = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True))
        found.append(np.array(own if draw(st.booleans()) else sorted(own)))
    return found


def taken(x: Tensor, cuts: tuple[Cut | None, ...], rank: int) -> Tensor:
    for dim, cut in enumerate(cuts):
        if cut is not None:
            x = x.index_select(dim, torch.from_numpy(cut.indices(rank)))
    return x


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_regrouping_holds_the_same_elements_in_the_same_order(data: st.DataObject) -> None:
    before, after = data.draw(
        st.sampled_from(
            [((2, 3, 4), (6, 4)), ((6, 4), (2, 3, 4)), ((12,), (3, 4)), ((3, 4), (2, 6)), ((4,), (4, 1))]
        )
    )
    dim = data.draw(st.integers(0, len(before) - 1))
    cut = cut_of(before[dim], data.draw(parts(before[dim])))
    cuts = tuple(cut if d == dim else None for d in range(len(before)))
    found = Regroup(before, after).forward(cuts)
    x = torch.arange(int(np.prod(before))).view(before)
    if found is not None:
        for rank in range(2):
            own = taken(x, cuts, rank)
            assert torch.equal(own.reshape(-1), taken(x.reshape(after), found, rank).reshape(-1))
        assert (
            Regroup(before, after).backward(found) in (cuts, None) or regrouped(after, found, before) == cuts
        )


def test_heads_of_a_projection() -> None:
    """The columns of two heads of four, and back; half of each head is no part of a projection's heads."""
    heads = blocks(4, 2)
    assert Regroup((4, 8), (32,)).forward((heads, None)) == (blocks(32, 2),)
    assert Regroup((4, 8), (32,)).backward((blocks(32, 2),)) == (heads, None)
    assert Regroup((32,), (4, 8)).forward((cut_of(32, [np.arange(4), np.arange(4, 32)]),)) is None


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_slices(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    start = data.draw(st.integers(0, size - 1))
    step = data.draw(st.integers(1, 3))
    count = len(range(start, size, step))
    how = Slice(size, start, step, count)
    x = torch.arange(size)
    whole = x[start::step]
    cut = cut_of(size, data.draw(parts(size)))
    found = how.forward((cut,))
    if cut is not None and found is not None:
        for rank in range(2):
            places = strided(how.places(cut.indices(rank))[0])
            assert places is not None
            own = taken(x, (cut,), rank)[places[0] : places[1] : places[2]]
            assert torch.equal(own, taken(whole, found, rank))
    wanted = cut_of(count, data.draw(parts(count)))
    if wanted is not None:
        back = how.backward((wanted,))
        assert back is not None
        for rank in range(2):
            assert torch.equal(taken(x, back, rank), taken(whole, (wanted,), rank))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_repeats(data: st.DataObject) -> None:
    size, times = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    how, x = Repeat(size, times), torch.arange(size)
    cut = cut_of(size, data.draw(parts(size)))
    found = how.forward((cut,))
    assert found is not None
    for rank in range(2):
        own = taken(x, (cut,), rank).repeat_interleave(times)
        assert torch.equal(own, taken(x.repeat_interleave(times), found, rank))
    assert how.backward(found) == (cut,)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_blocks(ranks: int) -> None:
    for size in range(ranks, 40):
        even = blocks(size, ranks)
        assert even is not None and even.exact and max(even.counts) - min(even.counts) <= 1
        cover = covering(size, ranks)
        assert cover is not None and len(set(cover.counts)) == 1
        assert set(np.concatenate([cover.indices(rank) for rank in range(ranks)])) == set(range(size))
        assert cover.exact == (size % ranks == 0)
    heads = repeated(2, 2 * ranks)
    assert heads is not None and not heads.exact and heads.indices(ranks) == [1]
    assert repeated(1, ranks) is None  # all ranks have the only one
