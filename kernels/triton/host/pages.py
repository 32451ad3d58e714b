"""Copies pages of a pool by the generated kernel of role page_copy."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.append.encode.tile import power_of_two
from kvcompile.kernels.triton.append.page_copy import page_of, words
from kvcompile.kernels.triton.device import interpreted
from kvcompile.kernels.triton.host import ops_write
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import CacheLayout

_LARGEST_TILE = 1024  # words: 16 bytes of each of 256 threads


def copy_pages(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Page targets[n] of `pool` [pages, ...], dense, becomes what page sources[n] is, in place.

    sources, targets: integers [N]; no page is in both, and none twice in targets
    """
    page_bytes = pool[0].numel() * pool.element_size()
    options = (words(page_bytes), *(("interpreted",) if interpreted() else ()))
    # Only the size of a page counts: any site will do.
    spec = KernelSpec(
        "page_copy", SiteSpec(CacheLayout(), 1.0), 1, 1, 1, 1, "float32", options=tuple(sorted(options))
    )
    block_n = min(power_of_two(page_of(spec)[1]), _LARGEST_TILE)
    ops_write.page_copy(pool, sources.int(), targets.int(), replace(spec, block_n=block_n).to_json())
