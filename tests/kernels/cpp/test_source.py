"""How C++ kernels are compiled and kept, what runs where nothing can be compiled, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcompile.errors import KernelError
from kvcompile.kernels.cpp import available as here
from kvcompile.kernels.cpp import isa
from kvcompile.kernels.cpp.host import compiler, ops, source
from kvcompile.kernels.cpp.host.attention import spec_of
from kvcompile.kernels.ops import cached_attention as op
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, int8
from kvcompile.util.libraries import is_whole

SPEC = spec_of(SiteSpec(CacheLayout(int8(), int8()), 0.5), (2, 1), (8, 8), "torch.float32")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    source._kernel.cache_clear()
    yield tmp_path / "cache" / compiler.FOLDER
    source._kernel.cache_clear()
    ops.forget()


def test_a_kernel_is_compiled_once_and_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = source.kernel(SPEC)
    assert first.library.parent == folder and first.library.with_suffix(".cpp").read_text().startswith("// ")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.suffix for path in folder.iterdir()) == [".cpp", ".so"], "nothing else is left"
    source._kernel.cache_clear()
    monkeypatch.setattr(compiler, "_compile", lambda *args: pytest.fail("compiled again"))
    assert source.kernel(SPEC).library == first.library


@pytest.mark.parametrize(("command", "joins"), [("g++", True), ("/usr/bin/g++-12", True), ("clang++", False)])
def test_only_gcc_is_told_to_join_fewer_instructions(
    command: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler._own_flags.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "compiler", lambda: command)
        flags = compiler.flags_for(isa.isa())
    compiler._own_flags.cache_clear()
    assert ("--param=max-combine-insns=2" in flags) == joins


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_update_under_a_running_process_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Headers and templates of another version would be called as this one's are, and their library would stay."""
    texts = dict(compiler._texts())
    changed = texts | {"call.h": texts["call.h"] + "\n"}
    seen = iter([texts, changed] if when == "meanwhile" else [changed])
    monkeypatch.setattr(compiler, "_texts", lambda: next(seen))
    with pytest.raises(
        KernelError, match=r"have changed since this process imported them \(call\.h\).*start"
    ):
        source.kernel(SPEC)
    assert not [path for path in folder.iterdir() if path.suffix == ".so"] and next(seen, None) is None


@pytest.mark.parametrize("damage", ["half", "nothing", "text"])
def test_a_damaged_library_is_compiled_again(folder: Path, damage: str) -> None:
    """A process that loads the first half of one ends at once."""
    path = source.library_of(SPEC, isa.isa())
    whole = path.read_bytes()
    assert is_whole(path)
    path.unlink()  # it may be mapped: what is written is another file
    path.write_bytes({"half": whole[: len(whole) // 2], "nothing": b"", "text": b"half a libr"}[damage])
    assert not is_whole(path)
    assert source.kernel(SPEC).address
    assert path.stat().st_size == len(whole) and is_whole(path)


def test_the_hash_is_of_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda *_: None)  # names are all that is looked at
    found = {source.library_of(SPEC, own) for own in isa.available()}
    found.add(source.library_of(replace(SPEC, dtype="float16"), isa.isa()))
    monkeypatch.setattr(compiler, "version", lambda: "another compiler")
    found.add(source.library_of(SPEC, isa.isa()))
    assert len(found) == len(isa.available()) + 2


def test_what_the_compiler_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "generate", lambda spec: "not C++")
    with pytest.raises(
        KernelError, match=r"decode_\w+\.cpp: the compiler fails \(.*exit status 1\): .*error"
    ):
        source.library_of(SPEC, isa.isa())
    ops.forget()
    x = torch.randn(1, 1, 1, 8)
    buffers = [torch.zeros(1, 1, 4, 8)] * 2
    spec = SiteSpec(CacheLayout(), 0.5, kernels="cpp").to_json()
    with pytest.raises(RuntimeError, match=r"KernelError: .* the compiler fails"):
        op.cached_attention(
            x, x, x, buffers, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), [], 1, spec
        )


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelError, match="set KVCOMPILE_CACHE_DIR"):
        source.library_of(SPEC, isa.isa())


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise KernelError("there is no C++ compiler (tried g++)")

    monkeypatch.setattr(compiler, "compiler", none)
    here._no_compiler.cache_clear()
    assert here.problem(torch.device("cpu")) == "there is no C++ compiler (tried g++)"
    here._no_compiler.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "win32")
    assert "this is Windows" in (here.problem(torch.device("cpu")) or "")
    here._no_compiler.cache_clear()


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isa.available()[-1].name == "portable" and isa.isa() == isa.available()[0]
    monkeypatch.setenv(isa.VARIABLE, "portable")
    assert isa.isa().name == "portable"
    monkeypatch.setenv(isa.VARIABLE, "mmx")
    with pytest.raises(ValueError, match=r"KVCOMPILE_CPU_ISA=mmx: this machine has .*portable"):
        isa.isa()


@pytest.mark.optimized  # as the process has it
def test_saved_code_may_be_the_first_to_call() -> None:
    """Code that Inductor has kept calls the op where nothing has traced it: then it makes itself ready."""
    ops.launcher()  # the process finds it in the same folder, and compiles the kernel
    program = (
        "import torch\n"
        "from kvcompile.kernels.cpp.host import ops, source\n"
        "x, w = torch.ones(1, 8), torch.ones(3, 8)\n"
        "print(torch.ops.kvcompile.cpp_linear.default(x, w, None, source.linear_spec(x.dtype)).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.strip() == "[[8.0, 8.0, 8.0]]", done.stderr[-2000:]
