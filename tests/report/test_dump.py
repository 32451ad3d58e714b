"""KVCOMPILE_DUMP and TORCH_LOGS tell what optimize() did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import kvcompile
from kvcompile.recipe import load_recipe
from tests.support.models import NanoGPT, make, tiny_hf
from tests.support.understood_once import known

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EAGER = {"compile": {"mode": "none"}}


@dataclass(frozen=True)
class Dumped:
    """What was dumped of a model, and the dump's own script, which ran with TORCH_LOGS."""

    fast: Any
    folder: Path
    run: subprocess.CompletedProcess[str]

    @staticmethod
    def of(model: nn.Module, to: Path) -> Dumped:
        known.on = False  # every pass runs
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVCOMPILE_DUMP", str(to))
            fast: Any = kvcompile.optimize(model, "int8", **EAGER)
        folder = to / fast.plan.digest()
        env = {k: v for k, v in os.environ.items() if k != "KVCOMPILE_DUMP"} | {"TORCH_LOGS": "+kvcompile"}
        env["PYTHONPATH"] = os.pathsep.join([ROOT, env.get("PYTHONPATH", "")])
        run = subprocess.run(
            [sys.executable, str(folder / "repro.py")], capture_output=True, text=True, env=env, cwd=to
        )
        return Dumped(fast, folder, run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Dumped:
    return Dumped.of(make(NanoGPT), tmp_path_factory.mktemp("dumped"))


def check(dumped: Dumped) -> None:
    fast, folder = dumped.fast, dumped.folder
    names = {path.name for path in folder.iterdir()}
    assert {"1_captured.py", "2_canonical.py", "3_cached.py", "plan.txt", "recipe.yaml", "repro.py"} <= names
    ran = sorted(path.name for path in (folder / "passes").iterdir())
    assert "000_capture.py" in ran and any(name.endswith("_insert_cache.py") for name in ran)
    cached = next(name for name in reversed(ran) if name.endswith("_insert_cache.py"))
    assert "kvcompile.cached_attention" in (folder / "passes" / cached).read_text()
    told = (folder / "passes.txt").read_text()
    assert "  0 capture " in told and "detect: 1 runs, " in told
    assert sum(name.startswith("4_region_") for name in names) == len(fast.executor.regions.modules)
    assert "kvcompile.cached_attention" in (folder / "3_cached.py").read_text()
    assert "kvcompile.attention" in (folder / "2_canonical.py").read_text()
    assert json.loads((folder / "plan.json").read_text())["recipe_digest"] == fast.plan.recipe_digest
    assert load_recipe(folder / "recipe.yaml").cache == load_recipe("int8").cache
    assert dumped.run.returncode == 0, dumped.run.stderr
    assert f"plan {fast.plan.digest()}" in dumped.run.stdout


def test_dump_has_every_stage_and_a_script_that_runs(plain: Dumped) -> None:
    check(plain)


def test_a_dump_that_cannot_be_written_breaks_nothing(
    plain: Dumped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("KVCOMPILE_DUMP", str(tmp_path / "file"))
    fast: Any = kvcompile.optimize(plain.fast.model, "int8", verify="off", **EAGER)
    assert fast.plan.digest() == plain.fast.plan.digest()
    (told,) = (record.getMessage() for record in caplog.records if "KVCOMPILE_DUMP" in record.getMessage())
    assert "cannot be written" in told and "nothing more is" in told
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_dump_of_a_model_of_transformers(tmp_path: Path) -> None:
    check(Dumped.of(tiny_hf("llama", "sdpa"), tmp_path))


def test_nothing_is_written_without_the_variable(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("KVCOMPILE_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    kvcompile.optimize(make(NanoGPT), "baseline", **EAGER)
    assert list(tmp_path.iterdir()) == []


def test_torch_logs_shows_one_line_per_pass(plain: Dumped) -> None:
    told = plain.run.stderr
    for name in ("capture:", "detect:", "canonicalize:", "verify lossless:"):
        assert len(re.findall(rf"^I.*\] {name}", told, re.MULTILINE)) == 1, f"{name} in:\n{told}"
