"""What kvcompile holds back while it traces and compiles: the noise of libraries, and Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Silences warnings, output and `loggers`, which no user can act on: what fails is raised, and told by who
    catches it."""
    found = [logging.getLogger(name) for name in loggers]
    levels = [logger.level for logger in found]
    try:
        for logger in found:
            logger.setLevel(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(found, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pauses the garbage collector; where it was on, it goes on afterwards.

    Tracing makes objects by the million and few cycles. Each full collection walks all of them, and those of the
    libraries besides: up to 40% of the time that an ONNX export takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
