"""Has the C++ of AOTInductor know numbers of 8 bits, which it names with PyTorch 2.11 and does not include."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

_ASKED = "get_device_include_path"  # which PyTorch 2.13 does not have, and includes them
_HEADERS = [f"#include <c10/util/Float8_{form}.h>" for form in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")]


@contextmanager
def known() -> Iterator[None]:
    """Within it, what is compiled includes what its arguments are."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    own = getattr(CppWrapperCpu, _ASKED, None)
    if own is None:
        yield
        return

    def included(device: str) -> str:
        return "\n".join([own(device), *_HEADERS])

    with mock.patch.object(CppWrapperCpu, _ASKED, staticmethod(included)):
        yield
