"""KVCOMPILE_DUMP and TORCH_LOGS tell what optimize() did."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import kvcompile
from kvcompile.recipe import load_recipe
from tests.support.marks import cases
from tests.support.models import NanoGPT, make, tiny_hf

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EAGER = {"compile": {"mode": "none"}}


def dump_of(model, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCOMPILE_DUMP", str(tmp_path))
    fast = kvcompile.optimize(model, "int8", **EAGER)
    return fast, tmp_path / fast.plan.digest()


@pytest.mark.parametrize("kind", cases(("hugging face", "plain"), ("plain",)))
def test_dump_has_every_stage_and_a_script_that_runs(kind, tmp_path, monkeypatch) -> None:
    model = tiny_hf("llama", "sdpa") if kind == "hugging face" else make(NanoGPT)
    fast, folder = dump_of(model, tmp_path, monkeypatch)
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
    env = {k: v for k, v in os.environ.items() if k != "KVCOMPILE_DUMP"}
    env["PYTHONPATH"] = os.pathsep.join([ROOT, env.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(folder / "repro.py")], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert f"plan {fast.plan.digest()}" in run.stdout


def test_nothing_is_written_without_the_variable(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("KVCOMPILE_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    kvcompile.optimize(make(NanoGPT), "baseline", **EAGER)
    assert list(tmp_path.iterdir()) == []


def test_torch_logs_shows_one_line_per_pass(tmp_path) -> None:
    code = (
        "import kvcompile; from tests.support.models import NanoGPT, make\n"
        "kvcompile.optimize(make(NanoGPT), 'baseline', compile={'mode': 'none'})"
    )
    env = dict(os.environ, TORCH_LOGS="+kvcompile", PYTHONPATH=ROOT)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for name in ("capture:", "detect:", "canonicalize:", "verify lossless:"):
        assert run.stderr.count(name) == 1, f"{name} in:\n{run.stderr}"
