"""Generated Triton kernels of this process, and tests that change how they are generated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcompile.kernels.triton.host import source


@contextmanager
def forgotten() -> Iterator[None]:
    """Kernels that were generated before or inside are not taken for those of another test."""
    caches = (source.kernel, source.kernel_of)
    for own in caches:
        own.cache_clear()
    try:
        yield
    finally:
        for own in caches:
            own.cache_clear()
