"""`kvcompile kernels --target cpp`: which kernels it names, that its files compile, what it reads of them."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvcompile.cli import app
from kvcompile.cli.cpp_kernels import isa_named
from kvcompile.errors import InputError
from kvcompile.kernels.cpp.isa import ISAS, available, widens
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.kernels.cpp.tools import machine_code
from kvcompile.kernels.cpp.tools.machine_code import main_loop, read

pytestmark = pytest.mark.optimized
SMALL = ["kernels", "--target", "cpp", "--heads", "2/1", "--head-dim", "16"]
LOOP = """
0000000000001140 <f>:
    1140:\tvmovaps %zmm1,0x40(%rsp)
    1148:\tvmovaps %zmm1,0x40(%rsp,%rax,4)
    1150:\tvfmadd231ps (%rax),%zmm2,%zmm3
    1158:\tvmovaps -0x80(%rbp),%zmm4
    1160:\tvmovups %ymm5,(%rsp)
    1168:\tnopw   0x0(%rax,%rax,1)
    1170:\tjne    1150 <f+0x10>
    1178:\tvdpbf16ps (%rax),%zmm2,%zmm3
    1180:\tvfmadd213ps %zmm3,%zmm2,%zmm3
    1188:\tjb     1178 <f+0x38>
    1190:\tjmp    1140 <f>
    1198:\tvmulps %zmm3,%zmm2,%zmm3
    11a0:\tret
"""


def invoked(*arguments: str) -> tuple[int, str, str]:
    shown = CliRunner().invoke(app, [*SMALL, *arguments])
    return shown.exit_code, shown.stdout, " ".join(shown.stderr.split())


@pytest.mark.parametrize("isa", [own.name for own in ISAS])
def test_any_instruction_set_can_be_asked(isa: str) -> None:
    code, shown, said = invoked("--recipe", "int8", "--isa", isa)
    assert code == 0, said
    assert {"decode", "linear", "prefill"} <= set(shown.split()) and isa in shown
    own = next(own for own in ISAS if own.name == isa)
    assert ("linear_many_bf16" in shown) == (isa in ("avx2", "avx512") or widens(torch.bfloat16, own)), (
        "the others have products, or no vectors"
    )


SCORED_RESIDUAL = """
cache:
  keys: {dtype: int8, residual: 16}
  values: {dtype: int8, residual: 16}
  placement: {kind: slots}
  retention: {kind: h2o, sinks: 2, heavy: 14, recent: 16}
"""


def test_every_prompt_has_a_kernel(tmp_path: Path) -> None:
    """Also where scores say what is kept beside the last tokens in full."""
    recipe = tmp_path / "scored_residual.yaml"
    recipe.write_text(SCORED_RESIDUAL, "utf-8")
    code, shown, said = invoked("--recipe", str(recipe))
    assert code == 0, said
    assert "decode_" in shown and "prefill_" in shown


def test_what_is_written_compiles_by_itself(tmp_path: Path) -> None:
    """The first line of a file is the command that compiles it where it lies."""
    folder = tmp_path / "sources"
    code, _, said = invoked("--recipe", "int8", "--out", str(folder))
    assert code == 0 and f"{folder}: " in said
    sources = sorted(folder.glob("*.cpp"))
    assert {path.stem.partition("_")[0] for path in sources} >= {"decode", "linear", "prefill"}
    (decode,) = folder.glob("decode_*.cpp")
    spec = next(line for line in decode.read_text().splitlines() if line.startswith("// {"))
    assert CppSpec.from_json(spec.removeprefix("// ")).key in decode.name
    command = shlex.split(decode.read_text().splitlines()[0].removeprefix("// "))
    subprocess.run(command, cwd=folder, check=True, env={"PATH": "/usr/bin:/bin"})
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", decode.with_suffix(".so")], capture_output=True, text=True, check=True
    )
    assert "kvcompile_kernel" in symbols.stdout


@pytest.mark.skipif(machine_code.problem() is not None, reason=str(machine_code.problem()))
def test_assembled() -> None:
    isa = available()[0].name
    code, shown, said = invoked("--recipe", "int8", "--assemble", "--isa", isa)
    assert code == 0, said
    rows = [line.split() for line in shown.splitlines() if isa in line]
    assert {row[0] for row in rows} >= {"decode", "linear", "prefill"}
    for row in rows:
        size, _, loop, products, _ = (int(word.replace(",", "")) for word in row[-5:])
        assert size > loop > products > 0


def test_machine_that_reads_no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code.platform, "machine", lambda: "aarch64")
    code, _, said = invoked("--assemble")
    assert code == 1 and "machine code is read for x86-64, and this is aarch64" in said
    monkeypatch.undo()
    monkeypatch.setattr(machine_code.shutil, "which", lambda name: None)
    code, _, said = invoked("--assemble")
    assert code == 1 and "there is no objdump" in said and "install binutils" in said


def test_a_library_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_text("nothing")
    with pytest.raises(Exception, match=r"a\.so: (objdump cannot read it|machine code|there is no objdump)"):
        read(tmp_path / "a.so")


def test_the_main_loop_is_that_of_the_products() -> None:
    """Of inner loops, the one with the most products; a store with an index is an array and no spill."""
    code = machine_code.machine_code(LOOP)
    assert code.size == 12, "what does nothing is not counted"
    assert [each.name for each in code.loop] == ["vdpbf16ps", "vfmadd213ps", "jb"]
    assert (code.products, code.loop_spills, code.spills) == (2, 0, 2)
    one = machine_code.machine_code(LOOP.replace("vdpbf16ps", "vaddps").replace("vfmadd213ps", "vaddps"))
    assert (len(one.loop), one.products, one.loop_spills) == (4, 1, 1)
    assert main_loop([]) == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--isa", "mmx"], "--isa: expected amx_bf16, avx512_bf16, avx512, avx2, portable, got 'mmx'"),
        (["--target", "metal"], "--target: expected triton or cpp, got 'metal'"),
        (["--target", "triton", "--isa", "avx2"], "--isa is of a CPU: add --target cpp"),
        (["--heads", "258/2"], "129 query heads share a KV head, and kernels are for at most 128"),
        (["--recipe", "int4", "--head-dim", "80"], "group 32 does not divide head_dim 80"),
    ],
)
def test_what_is_refused(arguments: list[str], said: str) -> None:
    code, _, shown = invoked(*arguments)
    assert code == 1 and said in shown


def test_the_variable_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_CPU_ISA", "portable")
    assert isa_named(None).name == "portable" and isa_named("avx2").name == "avx2"
    monkeypatch.setenv("KVCOMPILE_CPU_ISA", "mmx")
    with pytest.raises(InputError, match="KVCOMPILE_CPU_ISA=mmx"):
        isa_named(None)
