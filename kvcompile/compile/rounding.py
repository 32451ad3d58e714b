"""Has the C++ of older PyTorch round where the graph rounds.

A scale is rounded to what is stored before codes are made with it. Inductor leaves such a rounding out where the number
is read once more in the same loop, and keeps it when it is told so (`emulate_precision_casts`): in C++, PyTorch 2.11
does not. Four codes in a thousand of a prompt were those of the number before it was rounded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def rounding() -> Iterator[None]:
    """Within it, what Inductor compiles for a CPU reads numbers as they are stored."""
    from torch._inductor.codegen import cpp

    if "emulate_precision_casts" in inspect.getsource(cpp.CppOverrides.to_dtype):
        yield
        return
    # It notes that the number before it was rounded will do for whoever asks for the rounded one.
    with mock.patch.object(cpp.CppKernel, "cache_dtype_convert", lambda *_: None):
        yield
