"""What tests compile quicker is what everybody compiles."""

from __future__ import annotations

from pathlib import Path

from kvcompile.kernels.cpp.host import source
from kvcompile.kernels.cpp.host.attention import spec_of
from kvcompile.kernels.cpp.isa import isa
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, int8
from tests.support.compiled_once import PLAIN, CompiledOnce, text_ahead

TEXT = source.text_of(
    spec_of(SiteSpec(CacheLayout(int8(), int8()), 0.5), (2, 1), (8, 8), "torch.float32").to_json()
)


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
