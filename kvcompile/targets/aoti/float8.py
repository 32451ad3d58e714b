"""Has the C++ of AOTInductor know numbers of 8 bits, which it names with PyTorch 2.11 and does not include."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.torch_version import TorchVersion

_KNOWN_SINCE = "2.13"
_ASKED = "get_device_include_path"  # which newer versions do not have
_HEADERS = [f"#include <c10/util/Float8_{form}.h>" for form in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")]


@contextmanager
def known() -> Iterator[None]:
    """Within it, what is compiled includes what its arguments are."""
    if TorchVersion(torch.__version__) >= _KNOWN_SINCE:
        yield
        return
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    own = getattr(CppWrapperCpu, _ASKED)

    def included(device: str) -> str:
        return "\n".join([own(device), *_HEADERS])

    with mock.patch.object(CppWrapperCpu, _ASKED, staticmethod(included)):
        yield
