"""What tests compile quicker is what everybody compiles, but for how much the compiler optimizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor import codecache

from kvcompile.kernels.cpp.host import source
from kvcompile.kernels.cpp.host.attention import spec_of
from kvcompile.kernels.cpp.isa import isa
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, int8
from tests.support.compiled_once import FLAGS, PLAIN, CompiledOnce, text_ahead

TEXT = source.text_of(
    spec_of(SiteSpec(CacheLayout(int8(), int8()), 0.5), (2, 1), (8, 8), "torch.float32").to_json()
)


@pytest.mark.optimized
def test_marked_tests_have_the_flags_of_users() -> None:
    assert "-O3" in FLAGS and {*FLAGS} <= {*TEXT.flags(isa())}


def test_the_others_differ_in_one() -> None:
    assert {*FLAGS} - {*TEXT.flags(isa())} == {"-O3"} and "-O1" in TEXT.flags(isa())


@pytest.mark.optimized
def test_the_machine_code_is_the_same(tmp_path: Path) -> None:
    once = CompiledOnce(tmp_path)
    flags = TEXT.flags(isa())
    written = tmp_path / "kernel.cpp"
    written.write_text(TEXT.text, "utf-8")
    ahead = [once.ahead(TEXT.text, flags) for _ in range(4)]
    assert ahead[:2] == [(), ()] and ahead[2] == ahead[3] != ()
    header = Path(ahead[3][1])
    assert header.with_suffix(".h.gch").exists() and header.read_text("utf-8") == text_ahead()
    made = []
    for more in ((), (*ahead[3], "-Winvalid-pch", "-Werror=invalid-pch")):
        PLAIN(written, tmp_path / "kernel.so", (*flags, *more))
        made.append((tmp_path / "kernel.so").read_bytes())
    assert made[0] == made[1]


class Builder:
    """Of Inductor's, and how often it has compiled."""

    def __init__(self, target: Path) -> None:
        self.target, self.built = target, 0

    def get_target_file_path(self) -> str:
        return str(self.target)

    def build(self) -> None:
        self.built += 1
        self.target.write_text("code")


def test_inductors_libraries_go_from_cache_to_cache(tmp_path: Path) -> None:
    """And nothing else of it: a header's name says nothing of its text."""
    made = codecache._worker_compile_cpp
    assert getattr(made, "__func__", None) is CompiledOnce.compile_of_inductor
    once, built = CompiledOnce(tmp_path), {}
    for cache in ("one", "other"):
        (tmp_path / cache).mkdir()
        for name in ("ab.main.so", "cd.main.so", "ef.h.gch"):
            builder = Builder(tmp_path / cache / name)
            once.compile_of_inductor(str(tmp_path / "lock"), [builder])
            assert builder.target.read_text() == "code"
            built[cache, name] = builder.built
    assert built == {
        **{("one", name): 1 for name in ("ab.main.so", "cd.main.so", "ef.h.gch")},
        ("other", "ab.main.so"): 0,
        ("other", "cd.main.so"): 0,
        ("other", "ef.h.gch"): 1,
    }
