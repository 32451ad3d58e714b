"""Keeps apart the arrays of sizes in AOTInductor's C++ that stand in different scopes, where PyTorch mixes them up.

A size or stride that the C++ needs twice is declared once, for whoever writes to the same part of the program. PyTorch
2.11 knows the part by the id of the bound method that writes to it. Such a method lives for one call, and one of
another part may get its id: then an array is read where none is declared, and the C++ does not compile. Newer versions
ask for the id of the part. So each part's method is kept alive here, and is the one that is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

Write = Callable[..., None]
_DECLARES = "codegen_int_array_var"


def with_lasting_ids(own: Callable[..., str]) -> Callable[..., str]:
    """`codegen_int_array_var` as it is, given for each part of a program always the same method."""
    methods: dict[tuple[int, Any], Write] = {}

    def declared(self: Any, int_array: str, writeline: Write, *rest: Any, **named: Any) -> str:
        part = (id(getattr(writeline, "__self__", writeline)), getattr(writeline, "__func__", None))
        return own(self, int_array, methods.setdefault(part, writeline), *rest, **named)

    return declared


@contextmanager
def kept_apart() -> Iterator[None]:
    """Within it, what is compiled declares each array where it is read."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    own = getattr(CppWrapperCpu, _DECLARES, None)
    if own is None or "__self__" in inspect.getsource(own):
        yield
        return
    with mock.patch.object(CppWrapperCpu, _DECLARES, with_lasting_ids(own)):
        yield
