"""What the tests of kernels that write the cache share: layouts, sequences that come in pieces, and comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.spec import KernelSpec, Role
from kvcompile.layouts import CacheLayout, InKeys, Paged
from kvcompile.specs import RotaryForm

HQ, HKV = 4, 2
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(scope="module", autouse=True)
def kernels_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@dataclass(frozen=True)
class Site:
    """A layout with sizes; tokens come in `chunks`, with padding on the left of some sequences."""

    layout: CacheLayout
    dims: tuple[int, int] = (16, 8)
    dtype: torch.dtype = torch.float32
    rotary: RotaryForm | None = None
    limit: int = 40

    def spec(self, role: Role, *options: str, block_n: int = 4) -> KernelSpec:
        site = SiteSpec(self.layout, 0.25, rotary=self.rotary)
        name = str(self.dtype).removeprefix("torch.")
        options = tuple(sorted({*options, "interpreted"}))
        return KernelSpec(role, site, HQ, HKV, *self.dims, name, block_n=block_n, fp8="bits", options=options)

    def buffers(self, batch: int) -> tuple[list[Tensor], Tensor | None]:
        """The site's buffers, filled with what means nothing, and its page table."""
        g = torch.Generator().manual_seed(5)
        specs = self.layout.buffers(HKV, *self.dims, self.dtype, self.limit)
        table, pages = None, 0
        if isinstance(self.layout.placement, Paged):
            # Two entries more than sequences have pages: padding counts from the end.
            used = -(-self.layout.slots(self.limit) // self.layout.placement.page_size)
            pages = 1 + batch * used
            order = 1 + torch.randperm(pages - 1, generator=g)
            table = torch.zeros(batch, used + 2, dtype=torch.int32)
            table[:, :used] = order.view(batch, used)
        found = []
        for spec in specs:
            shape = (pages if spec.paged else batch, *spec.shape)
            # Values that every dtype has, none of them zero.
            x = torch.randint(1, 60, shape, generator=g).to(torch.float32).to(spec.dtype)
            found.append(x)
        return found, table


def vectors(seed: int, shape: tuple[int, ...], dtype: torch.dtype, size: float = 1.0) -> Tensor:
    """Channels that stand out, rows of one value, of zeros, and rows that no scale in float16 holds."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * (1 + 9 * (torch.rand(shape[-1], generator=g) > 0.8)) * size
    kind = torch.rand(shape[:-1], generator=g)
    x[kind < 0.08] = 0.0
    # The minimum of one value is rounded, and what is left over has a scale of 0.
    x[(kind > 0.08) & (kind < 0.14)] = 10003.37
    if dtype != torch.float16:
        x[(kind > 0.14) & (kind < 0.18)] *= 1e7
    return x.to(dtype)


def new_positions(seen: Tensor, size: int, padding: Tensor) -> Tensor:
    """Positions of the next `size` tokens of sequences of `seen` tokens; padding: what is left of it, [B]."""
    return seen[:, None] - padding.clamp(max=size)[:, None] + torch.arange(size)


def as_bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in _FP8 else x


def names(layout: CacheLayout, site: Site) -> list[str]:
    return [buffer.name for buffer in layout.buffers(HKV, *site.dims, site.dtype, site.limit)]


def strided(x: Tensor) -> Tensor:
    """x [B, H, S, D] as it comes from a projection: a view with the heads behind the tokens, between others."""
    room = torch.full((x.shape[0], x.shape[2], x.shape[1] + 2, x.shape[3]), 3.0).to(x.dtype)
    room[:, :, 1:-1] = x.transpose(1, 2)
    return room[:, :, 1:-1].transpose(1, 2)


def has_values(layout: CacheLayout) -> bool:
    return not isinstance(layout.values, InKeys)


__all__ = [
    "HKV",
    "HQ",
    "Site",
    "as_bits",
    "has_values",
    "kernels_folder",
    "names",
    "new_positions",
    "strided",
    "vectors",
]
