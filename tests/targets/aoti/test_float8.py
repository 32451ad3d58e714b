"""C++ that has numbers of 8 bits among its arguments includes what they are, where PyTorch forgets it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch.utils.cpp_extension import include_paths

from kvcompile.targets.aoti import float8

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def nothing(device: str) -> str:
    return ""


def test_headers_are_included_where_pytorch_forgets_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # PyTorch 2.11 asks for the header of a device by this; newer versions do not have it.
    monkeypatch.setattr(CppWrapperCpu, float8._ASKED, staticmethod(nothing), raising=False)
    with float8.known():
        text = getattr(CppWrapperCpu, float8._ASKED)("cpu")
    assert getattr(CppWrapperCpu, float8._ASKED) is nothing
    names = [str(dtype).removeprefix("torch.float8_") for dtype in DTYPES]
    text += "".join(f"\nvoid of_{name}(const at::Float8_{name}* x);" for name in names)
    (tmp_path / "code.cpp").write_text(text)
    folders = [f"-I{folder}" for folder in include_paths()]
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", *folders, "code.cpp"], cwd=tmp_path, check=True)


def test_a_pytorch_that_includes_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CppWrapperCpu, float8._ASKED, raising=False)
    with float8.known():
        assert not hasattr(CppWrapperCpu, float8._ASKED)
