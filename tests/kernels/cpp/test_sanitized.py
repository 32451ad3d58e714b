"""Kernels and their launcher built with the address and undefined-behaviour sanitizers, over small cases of every kind.

They run in a process of their own, which loads the sanitizers before Python: an access beyond a tensor, or what C++
leaves undefined, ends it with a report.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompile.kernels.cpp.host import ops
from kvcompile.kernels.cpp.host.compiler import compiler
from kvcompile.kernels.cpp.isa import VARIABLE, available
from tests.kernels.cpp.test_attention import CASES, PROMPTS, WHOLE
from tests.kernels.cpp.test_expression import CARRIED

ROOT = Path(__file__).parents[3]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1")
# {whole}: whether the launcher is built so, too, which takes as long as many kernels.
# {broken}: the case whose kernel is broken in the end, a text of it, and what stands there instead.
PROGRAM = """
import sys
import torch
from kvcompile.kernels.cpp.host import compiler, ops, source
from tests.kernels.cpp.test_attention import SIZES
from tests.kernels.cpp.test_broken import SITES
from tests.support.triton_attention import ran

def built(name, text, flags):
    if name.startswith("launcher"):
        return compiler.built(name, text, (*flags, *sanitizers) if {whole} else flags)
    if change is not None:
        assert change[0] in text
        text = text.replace(*change)
    return compiler.built(name, text, (*flags, *sanitizers))

sanitizers, names, broken, change = {sanitizers!r}, {names!r}, {broken!r}, None
ops.built = source.built = built
torch.set_num_threads(2)
cases = SITES | SIZES
for name in names:
    print(name, flush=True)
    ran(cases[name], "cpp")
print("done", flush=True)
if broken is not None:
    change = broken[1:]
    ran(cases[broken[0]], "cpp")
"""


def library(name: str) -> str | None:
    """A sanitizer's library, where the compiler has one."""
    asked = [compiler(), f"-print-file-name={name}"]
    path = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60).stdout.strip()
    return path if os.path.isabs(path) else None


def sanitized(
    names: list[str], folder: Path, isa: str, broken: tuple[str, str, str] | None = None, whole: bool = True
) -> subprocess.CompletedProcess[str]:
    """A process that runs cases; its exit code is 0 where nothing was found."""
    found = [library(f"lib{name}.so") for name in ("asan", "ubsan")]
    if None in found:
        pytest.skip("the compiler has no sanitizers as shared libraries")
    environment = os.environ | {
        "LD_PRELOAD": " ".join(str(path) for path in found),
        # Python and PyTorch keep what they allocated.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "KVCOMPILE_CACHE_DIR": str(folder),
        VARIABLE: isa,
        "OMP_NUM_THREADS": "2",
    }
    text = PROGRAM.format(sanitizers=SANITIZERS, names=names, broken=broken, whole=whole)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
        timeout=1800,
    )


def test_one_case_is_clean_and_an_access_beyond_a_tensor_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second says that the sanitizers are there: the newest token goes far behind the last slot."""
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    ops.launcher()  # it is compiled as ever, and the process finds it
    broken = ("plain", "const int64_t slot = token;", "const int64_t slot = token + 40;")
    done = sanitized(["in cache"], tmp_path, available()[0].name, broken, whole=False)
    assert done.stdout == "in cache\ndone\n", done.stderr[-3000:]
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isa", [isa.name for isa in available()])
def test_cases_of_every_kind(isa: str, tmp_path: Path) -> None:
    """Ragged, padded and wrapped sequences, one slot, odd groups, sizes from 4 to 576, codes as whole numbers."""
    names = [*CASES, *(f"whole {name}" for name in WHOLE), "least", "odd", "wide", "group", "empty"]
    names += [*(f"carried {name}" for name in CARRIED), *(name for name in PROMPTS if name.startswith("H2O"))]
    done = sanitized(names, tmp_path, isa)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), (done.stdout[-200:], done.stderr[-3000:])
