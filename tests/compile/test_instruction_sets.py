"""Inductor tries the best instruction set only, and knows the others as well."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as config
from torch._inductor import cpu_vec_isa

from kvcompile.compile import instruction_sets, program_files
from kvcompile.compile.inductor import ShapeClass
from kvcompile.util.cache_dir import KEEP


class Isa(cpu_vec_isa.VecISA):
    """One of Inductor's: its name has all that it contains, and whether it is there is tried when it is asked."""

    def __init__(self, name: str, works: bool = True):
        self.name, self.works = name, works

    def __str__(self) -> str:
        return self.name


class Asking(Isa):
    """One that asks for more each time, as those with AVX-512 do."""

    def __bool__(self) -> bool:
        if super().__bool__():
            self.more = self.check_build("more")
            return True
        return False


def _check_build(self: Isa, code: str) -> bool:
    TRIED.append(self.name)
    return self.works


TRIED: list[str] = []
COMPILED: list[str] = []  # the sets that the header of kernels was precompiled for


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor with the second and third of three sets."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(cpu_vec_isa.sys, "platform", "linux")
    monkeypatch.setattr(cpu_vec_isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["wide", "wider"])
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", _check_build)
    _sets(monkeypatch)
    monkeypatch.setattr(instruction_sets, "precompile_header", _precompile)
    _another_process()
    with config.patch({"cpp.vec_isa_ok": None}):
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        yield
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def _precompile() -> Callable[[], None]:
    """As Inductor, which takes the best that it knows."""
    best: Any = cpu_vec_isa.pick_vec_isa()
    COMPILED.append(str(best))

    def load() -> None:
        if not best.works:
            raise RuntimeError("an unknown flag")

    return load


def _sets(monkeypatch: pytest.MonkeyPatch, wider_works: bool = True) -> None:
    own = [Isa("wide wider widest"), Isa("wide wider", wider_works), Asking("wide")]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", own)


def _known_sets() -> list[Any]:
    return list(cpu_vec_isa.valid_vec_isa_list())


def _known() -> list[str]:
    return [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()]


def _looked() -> bool | None:
    """As a process begins; None: Inductor looked for itself, else whether what it took works."""
    best = instruction_sets.take()
    if best is None:
        instruction_sets.look()
        return None
    return instruction_sets.confirmed(best) or instruction_sets.confirm(best)


def test_the_best_is_taken_at_once_and_tried_alone() -> None:
    best = instruction_sets.take()
    assert best is not None and str(cpu_vec_isa.pick_vec_isa()) == "wide wider"
    assert _known() == ["wide wider", "wide"] and TRIED == [] == COMPILED
    assert config.cpp.vec_isa_ok is None and not instruction_sets.confirmed(best)
    assert instruction_sets.confirm(best)
    assert COMPILED == ["wide wider"]
    assert bool(best) and TRIED == []  # who writes kernels asks once more
    assert _known() == ["wide wider", "wide"] and not _known_sets()[1].more


def test_where_the_best_fails_all_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    _sets(monkeypatch, wider_works=False)
    assert _looked() is False
    assert _known() == ["wide"]
    assert TRIED == ["wide wider", "wide", "wide"] and config.cpp.vec_isa_ok is None


def test_inductor_looks_when_nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it tries a set, all that it compiles is for that."""
    held: list[bool] = []
    monkeypatch.setattr(
        cpu_vec_isa.VecISA,
        "check_build",
        lambda *given: bool(held.append(instruction_sets.COMPILING.locked())),
    )
    _sets(monkeypatch, wider_works=False)
    assert _looked() is False
    assert held and all(held) and not instruction_sets.COMPILING.locked()


def test_nor_when_programs_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor is given the sets that they were compiled for then."""
    held: list[bool] = []

    @contextmanager
    def given(names: object) -> Iterator[None]:
        held.append(instruction_sets.COMPILING.locked())
        yield

    monkeypatch.setattr(program_files, "_instruction_sets", given)
    assert program_files.read([], tmp_path, {"wide": "-mwide"}, 1) == {}
    assert held == [True] and not instruction_sets.COMPILING.locked()


class Seeing(Isa):
    """One that tells the compiler what else it saw when it was tried, as AMX does."""

    def __bool__(self) -> bool:
        self.seen = super().__bool__()
        return self.seen

    def build_arch_flags(self) -> str:
        return "-mwide -mseen" if self.seen else "-mwide"

    seen = False


def test_programs_are_read_with_what_the_compiler_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries have the compiler's command line in their names; a set that is not tried would leave a part out."""
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Seeing("wide")])
    assert _looked()
    kept = program_files.instruction_sets({ShapeClass(True, True, True, 1): [print]})
    assert kept == {"wide": "-mwide -mseen"}
    _another_process()
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Seeing("wide")])
    read = program_files._instruction_sets
    with read(kept):
        (own,) = _known_sets()
        assert own.build_arch_flags() == "-mwide -mseen"
    with read({"of another kind": ""}):
        assert own.build_arch_flags() == "-mwide" and not own.seen
    assert TRIED == []


@pytest.mark.parametrize("asked", ["ATEN_CPU_CAPABILITY", "simdlen"])
def test_where_another_is_asked_for_all_are_tried(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if asked == "simdlen":
        with config.patch({"cpp.simdlen": 256}):
            assert _looked() is None
    else:
        monkeypatch.setenv(asked, "avx2")
        assert _looked() is None
    assert TRIED == ["wide wider", "wide", "wide"] and COMPILED == []


def _another_process() -> None:
    TRIED.clear()
    COMPILED.clear()
    cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()  # type: ignore[attr-defined]
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where it is kept that a set works."""
    monkeypatch.setenv(KEEP, "on")
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / instruction_sets.FOLDER


@pytest.mark.usefixtures("folder")
def test_that_the_best_works_is_kept() -> None:
    _looked()
    _another_process()
    _looked()
    assert _known() == ["wide wider", "wide"] and COMPILED == [] == TRIED


def test_that_it_fails_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _sets(monkeypatch, wider_works=False)
    _looked()
    assert list(folder.iterdir()) == []
    _another_process()
    _looked()
    assert _known() == ["wide"] and COMPILED == ["wide wider"] and "wide wider" in TRIED


@pytest.mark.parametrize("other", ["compiler", "processor", "torch", "set", "off", "not ours alone"])
def test_it_is_kept_for_this_compiler_processor_and_torch(
    other: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _looked()
    _another_process()
    match other:
        case "compiler":
            monkeypatch.setattr(instruction_sets, "version", lambda: "g++ 99")
        case "processor":
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx9": True})
        case "torch":
            monkeypatch.setattr(torch, "__version__", "9.9")
        case "set":
            monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Isa("wide")])
        case "off":
            monkeypatch.setenv(KEEP, "off")
        case _:
            folder.chmod(folder.stat().st_mode | stat.S_IWOTH)
    _looked()
    assert COMPILED
