"""The cache's shape as a manifest tells it, and back."""

from __future__ import annotations

import torch

from kvcompile.artifact.manifest import Cache, Manifest, Pages
from kvcompile.emit.functional import Functional
from kvcompile.layouts import BufferSpec, PageGroup
from kvcompile.plan import Limits
from kvcompile.runtime.shape import Buffer, CacheShape, Pool


def caches_of(function: Functional) -> tuple[Cache, ...]:
    """What the manifest says of a function's caches."""
    arguments = {argument.name: argument for argument in function.arguments(one=True)}
    found = []
    for name in function.caches:
        of, argument = function.shape.buffers[name], arguments[name]
        spec = of.spec
        found.append(
            Cache(
                name=name,
                dtype=_name(argument.dtype),
                shape=argument.shape,
                holds=None if argument.dtype == spec.dtype else _name(spec.dtype),
                fill=spec.fill,
                in_order=of.in_order,
                state=name in function.shape.state,
            )
        )
    return tuple(found)


def pages_of(function: Functional) -> tuple[Pages, ...]:
    """What the manifest says of a function's pages."""
    return tuple(
        Pages(
            table=pool.group.name,
            page_size=pool.group.page_size,
            slots=pool.group.slots,
            pages=pool.group.pages,
            dimension=f"pages_{number}",
            layers=pool.group.layers,
            caches=pool.buffers,
        )
        for number, pool in enumerate(function.shape.pools)
    )


def cache_shape(manifest: Manifest) -> CacheShape:
    """The cache that an artifact's graphs take."""
    paged = {name for pages in manifest.pages for name in pages.caches}
    buffers = {
        cache.name: Buffer(
            BufferSpec(
                cache.name,
                tuple(size for size in cache.shape[1:] if isinstance(size, int)),
                _dtype(cache.dtype),
                paged=cache.name in paged,
                fill=cache.fill,
            ),
            cache.in_order,
        )
        for cache in manifest.caches
    }
    pools = tuple(
        Pool(PageGroup(pages.table, pages.layers, pages.page_size, pages.slots, pages.pages), pages.caches)
        for pages in manifest.pages
    )
    limits = Limits(manifest.limits.max_batch, manifest.limits.max_tokens, manifest.limits.prefill_chunk)
    state = tuple(cache.name for cache in manifest.caches if cache.state)
    return CacheShape(buffers, pools, limits, manifest.slots, state)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
