"""Kernels that write the cache, ahead of time: they assemble without spills, and read and write whole vectors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.append import append, group, page_copy
from kvcompile.kernels.triton.append.encode.tile import power_of_two
from kvcompile.kernels.triton.host.ops_write import warps
from kvcompile.kernels.triton.retention import evict
from kvcompile.kernels.triton.spec import KernelSpec, Role
from kvcompile.kernels.triton.tools.assemble import ARCHES, Assembled, Request, assemble
from kvcompile.layouts import (
    CacheLayout,
    InKeys,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
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

KIVI = CacheLayout(per_channel(2, 32, 128), with_residual(uint(2, 32), 128))
SCORED = CacheLayout(int8(), int8(), Slots(), Scored(4, 508, 512))
PER_LAYER = CacheLayout(int8(), int8(), Paged(64), Scored(4, 3500, 512, granularity="layer"))


def request(
    role: Role,
    layout: CacheLayout,
    *options: str,
    arch: int = 90,
    dims: tuple[int, int] = (128, 128),
    block_n: int = 0,
) -> Request:
    one = "one" in options
    scored = one and isinstance(layout.retention, Scored)
    block_n = block_n or (append.heads(*dims) if scored else append.block_n(*dims, one))
    # sm_80 has no conversions of fp8.
    spec = KernelSpec(
        role,
        SiteSpec(layout, 0.1),
        32,
        8,
        *dims,
        "bfloat16",
        block_m=evict.block(int(layout.retention.budget())) if scored else 16,
        block_n=block_n,
        fp8="bits" if arch < 89 else "native",
        options=tuple(sorted(options)),
    )
    rows = group.rows(group.side_of(spec)) if role == "group" else block_n
    wide = power_of_two(max(dims)) if role == "group" else 1
    return Request(spec, arch, warps(append.elements(spec) if role == "append" else rows * wide), 2)


def check(requests: list[Request]) -> list[Assembled]:
    made = assemble(requests)
    for asked, item in zip(requests, made, strict=True):
        assert not item.spills and not item.stack, (str(asked.spec.layout), asked.spec.options)
        # Positions are single numbers, the vectors are not: a thread loads all that it holds of one at once.
        if asked.spec.role == "append":
            elements = asked.spec.block_n * power_of_two(max(asked.spec.head_dim, asked.spec.v_head_dim))
            held = 16 * elements // (32 * asked.num_warps)
            assert max(item.loads) >= min(128, held), (asked.spec, item.loads)
        elif asked.spec.role in ("group", "page_copy"):
            assert max(item.loads) == 128, (asked.spec, item.loads)
    return made


def test_every_role_assembles() -> None:
    check(
        [
            request("append", CacheLayout(int8(), uint(4, 32)), "rope", "q_out", "one"),
            request(
                "append",
                CacheLayout(with_hadamard(with_residual(fp8(), 4)), fp8(), Paged(32), SinkWindow(4, 60)),
                "full",
            ),
            request("append", CacheLayout(uint(3), fp8()), dims=(80, 96), arch=80),
            request("group", KIVI, "keys", arch=100),
            request("append", CacheLayout(int8(), int8()), "rope", "q_out", "one", block_n=8),
            request("append", SCORED, "rope", "q_out", "one"),
            request("append", PER_LAYER, "one"),
            request("score", SCORED, block_n=256),
            request("page_copy", SCORED, page_copy.words(8 * 32 * 128), block_n=1024),
        ]
    )


def test_notes_are_asked_for_at_once() -> None:
    """A search waits for memory once, with positions and all notes on their way; keys that turn wait for their angles.

    Of few slots, which are one tile and no copy, a compiler asks as late as it can.
    """
    most = CacheLayout(placement=Slots(), retention=Scored(4, 4092, 4096))
    scores = [request("score", layout, block_n=1024) for layout in (SCORED, most)]
    scores = [replace(one, spec=replace(one.spec, block_m=64), num_warps=8) for one in scores]
    searches = [
        request("append", layout, "one", *more) for layout in (SCORED, most) for more in ((), ("rope",))
    ]
    made = assemble([*searches, *scores])
    waits = [item.waits for item in made]
    assert waits[2] == 1 and waits[4:] == [1, 1] and max(waits) <= 3, waits
    # Words of several slots, and no number goes from thread to thread.
    assert all(max(item.loads) >= 64 and min(item.loads) >= 32 and not item.shared for item in made[4:])


LAYOUTS = [
    CacheLayout(),
    CacheLayout(float_dtype("float16"), float_dtype("float32")),
    CacheLayout(int8(), int8(), Paged(32)),
    CacheLayout(fp8(), fp8("e5m2", "none")),
    CacheLayout(fp8("e4m3", "head"), fp8("e4m3", "tensor")),
    CacheLayout(uint(4, 32), uint(2, 64)),
    CacheLayout(uint(3, 32), uint(8)),
    CacheLayout(nf4(32), mxfp4()),
    CacheLayout(mxfp4(), with_residual(nf4(), 64, 4)),
    CacheLayout(with_hadamard(int8()), with_hadamard(uint(4, 32)), Ring(), SinkWindow(4, 1020)),
    CacheLayout(with_residual(fp8(), 0, 4), with_residual(fp8(), 64)),
    CacheLayout(model_dtype(), InKeys(512)),
    KIVI,
    SCORED,
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_assembles(layout: CacheLayout, arch: int) -> None:
    dims = [(576, 512)] if isinstance(layout.values, InKeys) else [(128, 128), (64, 64), (256, 256), (96, 96)]
    asked = [
        request("append", layout, *options, arch=arch, dims=dim)
        for dim in dims
        for options in (("one", "full"), ("full",), ("rope", "q_out", "k_out", "v_out"))
    ]
    asked += [
        request(
            "append", layout, "one", "full", "rope", "q_out", arch=arch, dims=dim, block_n=append.heads(*dim)
        )
        for dim in dims
    ]
    asked += [request("group", layout, "keys", *one, arch=arch) for one in ((), ("one",)) if layout == KIVI]
    if layout == SCORED:
        copy = page_copy.words(8 * 32 * 128)
        asked += [
            request("append", PER_LAYER, "rope", "q_out", "one", arch=arch),
            request("score", layout, block_n=256, arch=arch),
        ]
        asked += [request("page_copy", layout, copy, block_n=1024, arch=arch)]
    check(asked)
