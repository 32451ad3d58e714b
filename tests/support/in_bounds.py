"""Within `in_bounds()`, kernels in Triton's interpreter touch no byte that is not of a tensor they were given.

What a GPU answers with an illegal access, or with another tensor's bytes, is no error for the interpreter, which reads
whatever memory of the process is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np


class OutOfBounds(AssertionError):
    """A kernel asked for memory of nobody."""


@contextmanager
def in_bounds() -> Iterator[None]:
    """Every load, store and atomic of a launch is looked at first; masked elements may point anywhere.

    Raises:
        OutOfBounds: within it, at the launch; Triton wraps it in an InterpreterError.
    """
    from triton.runtime import interpreter

    begins, ends, name = np.zeros(0, np.uint64), np.zeros(0, np.uint64), ""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare = executor._init_args_hst

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal begins, ends, name
        made = prepare(self, args, kwargs)
        held = [x.untyped_storage() for x in (*made[0], *made[1].values()) if hasattr(x, "untyped_storage")]
        spans = sorted({(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in held if x.nbytes()})
        begins, ends = (np.array([span[side] for span in spans], np.uint64) for side in (0, 1))
        name = self.fn.__name__
        return made

    def look(what: str, pointers: Any, mask: Any) -> None:
        at = np.atleast_1d(np.asarray(pointers.data, np.uint64))
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        asked = np.unique(at[np.broadcast_to(np.atleast_1d(mask.data).astype(bool), at.shape)])
        if not asked.size:
            return
        of = np.searchsorted(begins, asked, side="right") - 1
        outside = (of < 0) | (asked + size > ends[np.maximum(of, 0)])
        if outside.any():
            first = asked[outside][0]
            near = int(np.maximum(of, 0)[outside][0])
            beyond = int(first) - int(ends[near])
            raise OutOfBounds(
                f"{name} {what}s {int(outside.sum())} of {asked.size} places of nobody, the first {beyond} bytes after "
                f"the end of a tensor of {int(ends[near] - begins[near])} bytes"
            )

    def looking(method: str, what: str, place: int, masked: int) -> Any:
        plain = getattr(builder, method)

        def run(self: Any, *args: Any) -> Any:
            look(what, args[place], args[masked])
            return plain(self, *args)

        return patch.object(builder, method, run)

    with (
        patch.object(executor, "_init_args_hst", prepared),
        looking("create_masked_load", "load", 0, 1),
        looking("create_masked_store", "store", 0, 2),
        looking("create_atomic_rmw", "change", 1, 3),
    ):
        yield
