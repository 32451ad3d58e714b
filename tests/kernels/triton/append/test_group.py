"""Role group against the reference: groups that are whole have the same bits, all others are not touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.reference import residual
from kvcompile.kernels.triton.append.group import generate
from kvcompile.kernels.triton.host import ops_write  # noqa: F401  (registers the ops)
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Paged,
    Placement,
    Storage,
    int8,
    per_channel,
    with_hadamard,
)
from tests.support import reference_cache
from tests.support.triton_write import (
    HKV,
    Site,
    kernels_folder,  # noqa: F401  (a fixture)
    names,
    new_positions,
    strided,
    vectors,
)

op = torch.ops.kvcompile.triton_group.default


def whole_rows(name: str, part: Tensor, group: int, lens: Tensor, table: Tensor | None) -> Tensor:
    """Which rows [first, 1, row] of a part are those of groups that sequences of `lens` tokens have whole."""
    rows = torch.zeros(part.shape[0], 1, part.shape[2], dtype=torch.bool)
    for sequence, length in enumerate(lens.tolist()):
        for index in range(length // group):
            if table is None:
                rows[sequence, 0, index] = True
            else:
                rows[table[sequence, index // part.shape[2]], 0, index % part.shape[2]] = True
    return rows


def run(site: Site, side: str, chunks: list[int], padding: list[int]) -> None:
    layout = site.layout
    storage = layout.keys if side == "keys" else layout.values
    assert isinstance(storage, Storage) and storage.channelwise
    batch = len(padding)
    buffers, table = site.buffers(batch)
    seen, pads = torch.zeros(batch, dtype=torch.long), torch.tensor(padding)
    checked = 0
    for number, count in enumerate(chunks):
        k, v = (
            strided(vectors(number + i, (batch, HKV, count, d), site.dtype)) for i, d in enumerate(site.dims)
        )
        positions = new_positions(seen, count, pads)
        before = [x.clone() for x in buffers]
        reference_cache.append(k, v, buffers, positions, seen, layout, table)
        new = residual.in_basis(storage, k if side == "keys" else v)
        # One token is in the rows in full before; of many, those before them still are.
        ours = [x.clone() for x in before]
        for name, mine, theirs in zip(names(layout, site), ours, buffers, strict=True):
            if count == 1 and name.endswith("full"):
                mine.copy_(theirs)
        start = [x.clone() for x in ours]
        options = (side, "one") if count == 1 else (side,)
        spec = site.spec("group", *options)
        op(None if count == 1 else new, ours, positions, table, spec.to_json())
        lens = positions[:, -1] + 1
        for name, mine, theirs, old in zip(names(layout, site), ours, buffers, start, strict=True):
            if not name.startswith(side) or name.endswith("full"):
                assert torch.equal(mine, old), name
                continue
            now, was = (whole_rows(name, mine, storage.group, x.clamp(min=0), table) for x in (lens, seen))
            shape = (*mine.shape[:3], *[1] * (mine.dim() - 3))
            checked += int((now & ~was).sum())
            is_whole = (now & ~was).expand(mine.shape[:3]).reshape(shape)
            assert torch.equal(torch.where(is_whole, mine, 0), torch.where(is_whole, theirs, 0)), name
            assert torch.equal(torch.where(is_whole, 0, mine), torch.where(is_whole, 0, old)), name
        reference_cache.append_residual(k, v, buffers, positions, seen, layout)
        pads = (pads - count).clamp(min=0)
        seen = lens
    assert checked


STORAGES: list[Storage] = [
    per_channel(2, 4, 8),
    per_channel(4, 8, 8, "float32", 3),
    per_channel(3, 5, 10),
    per_channel(8, 4, 4),
    with_hadamard(per_channel(2, 4, 12, "float16", 2)),
]


@pytest.mark.parametrize("placement", [Contiguous(), Paged(20, None)], ids=str)
@pytest.mark.parametrize("number", range(len(STORAGES)), ids=[str(storage) for storage in STORAGES])
def test_whole_groups_are_those_of_the_reference(number: int, placement: Placement) -> None:
    storage = STORAGES[number]
    dtype = (torch.bfloat16, torch.float32, torch.float16)[number % 3]
    if isinstance(placement, Paged) and 8 in (getattr(storage, "group", 0),):
        placement = Paged(16)
    layout = CacheLayout(storage, int8(), placement)
    assert layout.check() is None
    run(Site(layout, (16, 8), dtype), "keys", [9, *[1] * 4, 6], [0, 3])
    run(Site(CacheLayout(int8(), storage, placement), (8, 24), dtype), "values", [3, 2, 11, 1], [0, 4])


def test_what_has_no_groups_of_tokens_is_refused() -> None:
    for layout, options in ((CacheLayout(int8()), ("keys",)), (CacheLayout(per_channel(2, 4, 8)), ())):
        with pytest.raises(ValueError, match="group is for one side"):
            generate(Site(layout).spec("group", *options))
    with pytest.raises(ValueError, match="no options"):
        generate(Site(CacheLayout(per_channel(2, 4, 8))).spec("group", "keys", "two"))
