"""Finds which kernels a site launches on a device, by running its ops on tensors without memory: no GPU is needed.

What decides is the code that launches (`attention.py`), so nothing here can differ from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.packed import PackedInputs
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.device import Device, acting_as
from kvcompile.kernels.triton.host.attention import cached_attention
from kvcompile.kernels.triton.host.launch import Recorded, known, recording
from kvcompile.kernels.triton.host.packed import cached_attention_packed
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import expression
from kvcompile.layouts import Paged


@dataclass(frozen=True)
class Launch:
    """A kernel, and how it is compiled. known: of its arguments (`launch.known`)"""

    spec: KernelSpec
    num_warps: int
    num_stages: int
    known: tuple[tuple[str, int], ...] = ()


def launches(
    site: SiteSpec,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: Device,
    tokens: int = 1,
    limit: int = 4096,
) -> tuple[Launch, ...]:
    """The kernels of one call with `tokens` new tokens of each of two sequences, in the order of their launches.

    heads, dims: of queries and keys; of keys and values. limit: of the tokens of a sequence
    """
    with recording() as found, acting_as(device), FakeTensorMode():
        call(site, heads, dims, dtype, limit, 2, tokens)
    return tuple(map(_launch, found))


def packed_launches(
    site: SiteSpec,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: Device,
    tokens: int = 64,
    limit: int = 4096,
) -> tuple[Launch, ...]:
    """Those of a packed call of two sequences that have `tokens` new tokens each, of a layout that can be packed."""
    layout, (queries, kv_heads), (dim, v_dim) = site.layout, heads, dims
    assert isinstance(layout.placement, Paged), layout
    pages = -(-layout.slots(limit) // layout.placement.page_size)
    specs = layout.buffers(kv_heads, dim, v_dim, dtype, limit)
    width = site.rotary.rotary_dim if site.rotary else 0
    with recording() as found, acting_as(device), FakeTensorMode():
        q, k = (torch.empty(1, count, 2 * tokens, dim, dtype=dtype) for count in (queries, kv_heads))
        v = k[..., :v_dim] if layout.in_keys else torch.empty(1, kv_heads, 2 * tokens, v_dim, dtype=dtype)
        rows = AttendInputs(
            q,
            k,
            v,
            [torch.empty(2 * pages + 1 if s.paged else 2, *s.shape, dtype=s.dtype) for s in specs],
            torch.empty(1, 2 * tokens, dtype=torch.int64),
            torch.empty(2, dtype=torch.int64),
            [torch.empty(limit, width), torch.empty(limit, width)] if site.rotary else [],
            limit,
            site,
            torch.empty(queries) if site.score.sinks else None,
            _bias(site, queries, limit),
            _leaves(site, limit, None),
            torch.empty(2, pages, dtype=torch.int32),
        )
        cached_attention_packed(PackedInputs(rows, torch.empty(3, dtype=torch.int64), 0, tokens))
    return tuple(map(_launch, found))


def call(
    site: SiteSpec,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    limit: int,
    batch: Any,
    tokens: Any,
    pool: Any = None,
    leaves: Sequence[Sequence[int]] | None = None,
) -> None:
    """One call of a site's op on new tensors, `tokens` new tokens of each of `batch` sequences; sizes may be symbols.

    pool:   pages of a pool; None: what the sequences take, and one more
    leaves: the shapes of what `ScoreSpec.mod` reads; None: any, which no spec of a kernel depends on
    """
    layout, (queries, kv_heads), (dim, v_dim) = site.layout, heads, dims

    def vectors(count: int, size: int) -> Tensor:
        return torch.empty(batch, count, tokens, size, dtype=dtype)

    page = layout.placement.page_size if isinstance(layout.placement, Paged) else 0
    specs = layout.buffers(kv_heads, dim, v_dim, dtype, limit)
    pages = -(-layout.slots(limit) // page) if page else 0
    pool = 1 + batch * pages if pool is None else pool
    buffers = [torch.empty(pool if s.paged else batch, *s.shape, dtype=s.dtype) for s in specs]
    q, k = vectors(queries, dim), vectors(kv_heads, dim)
    v = k[..., :v_dim] if layout.in_keys else vectors(kv_heads, v_dim)
    width = site.rotary.rotary_dim if site.rotary else 0
    x = AttendInputs(
        q,
        k,
        v,
        buffers,
        torch.empty(batch, tokens, dtype=torch.int64),
        torch.empty(batch, dtype=torch.int64),
        [torch.empty(limit, width), torch.empty(limit, width)] if site.rotary else [],
        limit,
        site,
        torch.empty(queries) if site.score.sinks else None,
        _bias(site, queries, limit),
        _leaves(site, limit, leaves),
        torch.empty(batch, pages, dtype=torch.int32) if page else None,
    )
    cached_attention(x)


def _bias(site: SiteSpec, heads: int, limit: int) -> Tensor | None:
    """A tensor of the shape that `BiasSpec` says."""
    bias = site.score.bias
    if bias is None:
        return None
    reach = bias.reach or limit
    shapes = {
        "alibi": (heads,),
        "relative": (heads, reach),
        "columns": (heads, reach),
        "table": (heads, reach, reach),
    }
    return torch.empty(shapes[bias.kind])


def _leaves(site: SiteSpec, limit: int, shapes: Sequence[Sequence[int]] | None) -> list[Tensor] | None:
    """Tensors of the ranks and dtypes that the site's expression reads; what it does not read is of float32."""
    mod = site.score.mod
    if mod is None:
        return None
    read = expression.tensors(mod).found
    of = [read.get(number, (0, torch.float32)) for number in range(len(mod.leaves))]
    sizes = [[limit] * rank for rank, _ in of] if shapes is None else shapes
    return [torch.empty(list(own), dtype=dtype) for own, (_, dtype) in zip(sizes, of, strict=True)]


def _launch(one: Recorded) -> Launch:
    return Launch(
        for_hardware(one.kernel.spec), one.num_warps, one.num_stages, known(one.kernel, one.tensors)
    )


def for_hardware(spec: KernelSpec) -> KernelSpec:
    """The spec as compiled, where this process has Triton's interpreter."""
    return replace(spec, options=tuple(option for option in spec.options if option != "interpreted"))
