"""What packages are linked with, where a compiler was moved away from the libraries that its links lead to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompile.kernels.cpp.isa import isa
from kvcompile.targets.aoti.package import _linked

CODE = """
#include <regex>
extern "C" bool matches(const char* text) { return std::regex_match(text, std::regex("a+")); }
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a compiler finds its library by other means")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_shared_library_of_pytorch_is_linked(tmp_path: Path) -> None:
    """Without it, the static one is: its code is in the package, and nothing says that a library is needed."""
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "libstdc++.so").symlink_to(tmp_path / "nowhere")
    found = subprocess.run(
        ["g++", "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True
    )
    (moved / "libstdc++.a").symlink_to(found.stdout.strip())
    (tmp_path / "code.cpp").write_text(CODE)

    def needed(name: str, *libraries: str) -> bool:
        build = ["g++", f"-L{moved}", "-O0", "-shared", "-fPIC", "-o", name, "code.cpp", *libraries]
        subprocess.run(build, cwd=tmp_path, check=True)
        return b"libstdc++.so.6\0" in (tmp_path / name).read_bytes()

    (given,) = _linked({}, isa())["aot_inductor.custom_op_libs"]
    assert not needed("plain.so"), "the static library is not what the linker takes: this test shows nothing"
    assert needed("linked.so", *f"-l{given}".split())
