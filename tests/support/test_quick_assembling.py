"""A fork is what a process of its own would be: its module, input, environment, folder, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcompile.backends.tensorrt_plugins import ptx
from kvcompile.kernels.triton.tools import assemble
from tests.support.quick_assembling import BEFORE, forks

TOLD = """
import os, sys, triton
from triton import knobs
print(sys.argv[1:], os.environ["KVCOMPILE_TOLD"], os.getcwd(), __name__, sys.stdin.read(), knobs.runtime.interpret)
print("said", file=sys.stderr)
"""


def forked(module: str, *words: str, given: str = "", **variables: str) -> Any:
    env = {**os.environ, "TRITON_INTERPRET": "0", **variables}
    command = [sys.executable, *BEFORE, module, *words]
    return forks.run(command, input=given, env=env, capture_output=True, text=True)


def test_modules_assemble_in_forks() -> None:
    assert assemble.subprocess is forks and ptx.subprocess is forks
    done = forked(assemble.__name__, "--batch", given='{"listing": false, "requests": []}')
    assert not isinstance(done, subprocess.CompletedProcess)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_fork_is_as_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"told": TOLD, "ends": "import sys\nsys.exit(3)", "fails": "1 / 0"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # nothing of the first is left
        done = forked("told", "a", "b", given="some text", KVCOMPILE_TOLD="something")
        told = f"['a', 'b'] something {tmp_path} __main__ some text False\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, told, "said\n")
    assert "KVCOMPILE_TOLD" in forked("told").stderr
    assert forked("ends").returncode == 3
    done = forked("fails")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_anything_else_is_a_process() -> None:
    done = forks.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True)
    assert isinstance(done, subprocess.CompletedProcess) and done.stdout == "1\n"
    done = forked("json.tool", given="[1]", PYTHONPATH="another")  # where another release of Triton may be
    assert isinstance(done, subprocess.CompletedProcess) and done.stdout.split() == ["[", "1", "]"]
