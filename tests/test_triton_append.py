"""Role append against `reference.append`: the same bits in every part of the cache, and nothing else touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels import codec, recent, reference
from kvcompile.kernels.rope import rotate
from kvcompile.kernels.triton import ops_write  # noqa: F401  (registers the ops)
from kvcompile.layouts import (
    Affine,
    CacheLayout,
    Contiguous,
    Float,
    Fp8,
    Full,
    InKeys,
    Int8,
    ModelDtype,
    Paged,
    PerChannel,
    Recent,
    Ring,
    Rotated,
    Scored,
    SinkWindow,
    Slots,
    Storage,
    Window,
)
from kvcompile.layouts.storage import as_kept
from kvcompile.types import RotaryForm
from tests.triton_write import (
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
    ModelDtype(),
    Float("float16"),
    Float("bfloat16"),
    Float("float32"),
    *[Fp8(form, scale) for form in ("e4m3", "e5m2") for scale in ("token", "none", "tensor", "head")],
    Fp8("e4m3", "token", "float32"),
    Int8(),
    Int8(scale_dtype="float32"),
    *[Affine(bits, group) for bits in (2, 3, 4, 8) for group in (0, 8)],
    Affine(4, 8, "float32"),
    Rotated(ModelDtype()),
    Rotated(Float("bfloat16")),
    Rotated(Fp8()),
    Rotated(Int8()),
    Rotated(Affine(3, 8)),
    Recent(Affine(2, 8), 6),
    Recent(Fp8(), 3, 2),
    Recent(Int8(), 0, 3),
    Rotated(Recent(Fp8("e5m2", "head"), 4, 1)),
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
    return ("full_sinks",) if layout.in_order else ("full",)


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
    site: Site, ours: list[Tensor], theirs: list[Tensor], before: list[Tensor], positions: Tensor, table: Tensor | None
) -> None:
    for name, mine, other, old in zip(names(site.layout, site), ours, theirs, before, strict=True):
        storage = site.layout.keys if name.startswith("keys") else site.layout.values
        if isinstance(as_kept(storage), PerChannel) and not name.endswith("full"):
            assert not differs(mine, old).any()
            continue
        padding = of_padding(site, name, mine, positions, table).expand(-1, HKV, -1)
        assert not (differs(mine, other) & ~padding).any(), name
        assert not (differs(mine, old) & padding & differs(other, old)).any(), f"{name}: padding was written"


def run(site: Site, chunks: list[int], padding: list[int], seed: int = 0, size: float = 1.0, block_n: int = 4) -> None:
    """Tokens in chunks: each by the kernel, from the state that the reference has left."""
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
        spec = site.spec("append", *options(layout, one), block_n=1 if one else block_n)
        own_v = v if has_values(layout) else None
        assert append(None, k, own_v, ours, positions, [], None, table, spec.to_json()) == []
        reference.append(k, v, buffers, positions, seen, layout, table)
        check_same(site, ours, buffers, before, positions, table)
        if layout.in_order and not one and layout.residual:
            before, ours = ([x.clone() for x in buffers] for _ in range(2))
            spec = site.spec("append", "only_full", block_n=block_n)
            append(None, k, own_v, ours, positions, [], None, table, spec.to_json())
            reference._append_recent(k, v, buffers, positions, seen, layout)
            check_same(site, ours, buffers, before, positions, table)
        pads = (pads - count).clamp(min=0)
        seen = positions[:, -1] + 1


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_every_storage_is_written_as_the_reference_does(storage: Storage) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = Int8() if storage == ModelDtype() else ModelDtype()
        run(Site(CacheLayout(storage, values), dtype=dtype), [6, 1, 1, 9], [0, 8])
        run(Site(CacheLayout(values, storage, Ring(), SinkWindow(3, 6)), (8, 24), dtype), [7, 1, 9], [0, 2])
