"""Kernels that write the cache, ahead of time: they assemble without spills, and read and write whole vectors."""

from __future__ import annotations

import pytest

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton import append, group, page_copy
from kvcompile.kernels.triton.assemble import ARCHES, Assembled, Request, assemble
from kvcompile.kernels.triton.encode.tile import power_of_two
from kvcompile.kernels.triton.ops_write import warps
from kvcompile.kernels.triton.spec import KernelSpec, Role
from kvcompile.layouts import (
    Affine,
    CacheLayout,
    Float,
    Fp8,
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
)

KIVI = CacheLayout(PerChannel(2, 32, 128), Recent(Affine(2, 32), 128))
SCORED = CacheLayout(Int8(), Int8(), Slots(), Scored(4, 508, 512))


def request(
    role: Role,
    layout: CacheLayout,
    *options: str,
    arch: int = 90,
    dims: tuple[int, int] = (128, 128),
    block_n: int = 0,
) -> Request:
    block_n = block_n or append.block_n(*dims, "one" in options)
    # sm_80 has no conversions of fp8.
    spec = KernelSpec(
        role,
        SiteSpec(layout, 0.1),
        32,
        8,
        *dims,
        "bfloat16",
        block_n=block_n,
        fp8="bits" if arch < 89 else "native",
        options=tuple(sorted(options)),
    )
    rows = group.rows(group.side_of(spec)) if role == "group" else block_n
    wide = power_of_two(max(dims)) if role in ("append", "group") else 1
    return Request(spec, arch, warps(rows * wide), 2)


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
            request("append", CacheLayout(Int8(), Affine(4, 32)), "rope", "q_out", "one"),
            request(
                "append", CacheLayout(Rotated(Recent(Fp8(), 4)), Fp8(), Paged(32), SinkWindow(4, 60)), "full"
            ),
            request("append", CacheLayout(Affine(3), Fp8()), dims=(80, 96), arch=80),
            request("group", KIVI, "keys", arch=100),
            request("evict", SCORED, block_n=1024),
            request("score", SCORED, block_n=256),
            request("page_copy", SCORED, page_copy.words(8 * 32 * 128), block_n=1024),
        ]
    )


LAYOUTS = [
    CacheLayout(),
    CacheLayout(Float("float16"), Float("float32")),
    CacheLayout(Int8(), Int8(), Paged(32)),
    CacheLayout(Fp8(), Fp8("e5m2", "none")),
    CacheLayout(Fp8("e4m3", "head"), Fp8("e4m3", "tensor")),
    CacheLayout(Affine(4, 32), Affine(2, 64)),
    CacheLayout(Affine(3, 32), Affine(8)),
    CacheLayout(Rotated(Int8()), Rotated(Affine(4, 32)), Ring(), SinkWindow(4, 1020)),
    CacheLayout(Recent(Fp8(), 0, 4), Recent(Fp8(), 64)),
    CacheLayout(ModelDtype(), InKeys(512)),
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
    asked += [request("group", layout, "keys", *one, arch=arch) for one in ((), ("one",)) if layout == KIVI]
    if layout == SCORED:
        copy = page_copy.words(8 * 32 * 128)
        asked += [
            request("evict", layout, block_n=1024, arch=arch),
            request("score", layout, block_n=256, arch=arch),
        ]
        asked += [request("page_copy", layout, copy, block_n=1024, arch=arch)]
    check(asked)
