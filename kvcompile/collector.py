"""Python's garbage collector, out of the way while graphs are traced.

Tracing makes objects by the million and few cycles. Each full collection walks all of them, and those of the libraries
besides: up to 40% of the time that an ONNX export takes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections by themselves; where they were on, they go on afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
