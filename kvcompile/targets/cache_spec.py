"""The cache that a manifest describes."""

from __future__ import annotations

from kvcompile.layouts import BufferSpec, PageGroup
from kvcompile.layouts.stepping import StepsBack
from kvcompile.plan import Limits
from kvcompile.runtime.cache_spec import Buffer, CacheShape, Pool
from kvcompile.targets.manifest import Manifest, dtype_named


def cache_shape(manifest: Manifest) -> CacheShape:
    """The cache that an artifact's graphs take."""
    paged = {name for pages in manifest.pages for name in pages.caches}
    buffers = {
        cache.name: Buffer(
            BufferSpec(
                cache.name,
                tuple(size for size in cache.shape[1:] if isinstance(size, int)),
                dtype_named(cache.dtype),
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
    back = StepsBack(0, "an artifact does not tell which caches step back")
    return CacheShape(buffers, pools, limits, manifest.slots, state, back)
