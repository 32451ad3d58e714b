"""What tests link sooner calls the same functions of PyTorch, and names the library that has them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import library_paths

from tests.support.quick_linking import NAME

TEXT = """\
#include <cstdint>
extern "C" int32_t aoti_torch_dtype_int8();
extern "C" int32_t own() { return 100 * aoti_torch_dtype_int8() + 7; }
"""
LIBRARIES = [*(f"-L{path}" for path in library_paths()), "-ltorch", f"-l{NAME}", "-ltorch_python"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not Path(os.environ.get("COMPILER_PATH", "nowhere").split(os.pathsep)[0], f"lib{NAME}.so").exists():
        pytest.skip("there is no GNU linker")
    (tmp_path / "own.cpp").write_text(TEXT)
    return tmp_path


def linked(folder: Path, quickly: bool, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if quickly or name != "COMPILER_PATH"}
    command = ["g++", *flags, str(folder / "own.cpp"), "-o", str(folder / "own.so"), *LIBRARIES]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_libraries_name_the_same_and_find_it(folder: Path) -> None:
    names, found = [], []
    for quickly in (True, False):
        done = linked(folder, quickly, "-shared", "-fPIC", "-O1")
        assert done.returncode == 0, done.stderr
        names.append(_needed(folder / "own.so"))
        library = Path(shutil.copy(folder / "own.so", folder / f"{quickly}.so"))
        found.append(ctypes.CDLL(str(library)).own())
    assert found[0] == found[1] and found[0] % 100 == 7
    assert names[0] == names[1] and f"lib{NAME}.so" in names[0]


def _needed(library: Path) -> list[str]:
    said = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return [line.split("[")[1].rstrip("]") for line in said.splitlines() if "(NEEDED)" in line]


def test_programs_are_linked_as_ever(folder: Path) -> None:
    """With all of the library: a name that it does not have is missing."""
    (folder / "own.cpp").write_text(TEXT.replace("int8()", "int8x()") + "int main() { return own(); }\n")
    assert "aoti_torch_dtype_int8x" in linked(folder, True).stderr
    assert linked(folder, True, "-shared", "-fPIC").returncode == 0
