"""benchmarks/kernels.py as it runs on a GPU, with tiny caches in Triton's interpreter: the same code, no figures."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcompile.kernels.triton.predict.step import LINEARS, measured_as

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "kernels.py"


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *arguments],
        env={**os.environ, "KVCOMPILE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
def test_a_dry_run_measures_compares_and_judges(tmp_path: Path) -> None:
    """A case with peers, some with pages and lengths that differ, a prompt, one that tracks scores, and an append."""
    out = tmp_path / "kernels.json"
    chosen = ("bf16 B1 32k", "B64 1k-64k", "bf16 B64 one of", "bf16 B1 prompt", "8k slots", "append int8 B1")
    chosen += ("linear SmolLM2 gate", "linear Llama-8B o")
    only = [part for name in chosen for part in ("--only", name)]
    done = run("--dry-run", *only, "--out", str(out), cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["meaningless"] and "the times mean nothing" in done.stdout
    rows = {row["case"]: row for row in result["cases"]}
    assert len(rows) == 10 and all(row["us"] > 0 and row["bytes"] > 0 for row in rows.values())
    assert rows["bf16 B1 prompt of 8k"]["tflops"] >= 0 and "TFLOPS" in done.stdout
    peers = rows["bf16 B1 32k"]["peers"]
    assert peers["torch SDPA"]["us"] > 0 and peers["FlexAttention"]["us"] > 0
    assert peers["vLLM"].startswith("not installed")
    assert {
        rows[f"linear {name}"]["peers"]["cuBLAS"]["us"] > 0 for name in ("SmolLM2 gate, up", "Llama-8B o")
    } == {True}
    assert rows["linear Llama-8B o fp32"]["dtype"] == "float32"
    assert [goal["goal"] for goal in result["goals"]] == [2, 7, 8, 8]
    assert "| bf16 B1 32k |" in done.stdout and "| goal | wanted | reached |" in done.stdout


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """kernels.py and kernel_linear.py, as they import each other."""
    names = ("kernels", "kernel_linear")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    own = [importlib.import_module(name) for name in names]
    yield own[0], own[1]
    for name in names:
        del sys.modules[name]


def test_linear_layers_of_the_model_are_measured(scripts: tuple[ModuleType, ModuleType]) -> None:
    """Those that steps are predicted of, under names that tables compare by; no name twice."""
    _, linear = scripts
    names = [case.name for case in linear.LINEAR]
    assert len({*names}) == len(names) and {measured_as(of) for of in LINEARS} < {*names}
    for of in LINEARS:
        case = next(case for case in linear.LINEAR if case.name == measured_as(of))
        assert replace(case, name=of.name) == linear.Case(
            of.name, of.columns, of.rows, of.activation, of.dtype
        )
    assert {case.dtype for case in linear.LINEAR} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("name", ["linear SmolLM2 q, k, v", "linear SmolLM2 gate, up"])
def test_linear_layers_that_are_wrong_have_no_figures(
    name: str, scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, linear = scripts
    case = next(case for case in linear.LINEAR if case.name == name).tiny()
    options = argparse.Namespace(dry_run=True, rounds=1)
    row = kernels.measure_linear(case, torch.device("cpu"), 1e9, options)
    assert (
        row["us"] > 0 and row["peers"]["cuBLAS"]["us"] > 0 and 0 < row["error"] < 0.02 and "wrong" not in row
    )
    results = sum(case.rows[:1] if case.activation else case.rows)
    assert row["bytes"] == 2 * (sum(case.rows) * 144 + 144 + results)
    right = linear.call_of

    def broken(problem: Any, copy: int = 0) -> Callable[[], list[torch.Tensor]]:
        return lambda: [*right(problem, copy)()[:-1], right(problem, copy)()[-1] * 1.03]

    monkeypatch.setattr(linear, "call_of", broken)
    row = kernels.measure_linear(case, torch.device("cpu"), 1e9, options)
    assert "us" not in row and "against float64" in row["wrong"]


def test_every_form_of_a_sweep_gives_the_same(scripts: tuple[ModuleType, ModuleType]) -> None:
    """Rows that no program has all of, and blocks that are wider than a row."""
    _, linear = scripts
    case = replace(linear.LINEAR[0].tiny(), rows=(5, 3), columns=80)
    problem = linear.problem_of(case, torch.device("cpu"), 3 * case.weight_bytes)
    assert len(problem.weights) == 3
    expected = linear.exact(problem)
    tried = linear.forms(problem)
    assert tried[0] == linear.form_now(problem) and len({*tried}) == len(tried) > 3
    for form in tried:
        made = linear.call_in(form, problem)()
        assert [one.shape for one in made] == [(1, 5), (1, 3)]
        assert linear.error_of(made, expected) <= linear.allowed(problem, expected)


@pytest.mark.slow
def test_a_dry_run_of_configurations_measures_the_table_twice(tmp_path: Path) -> None:
    out = tmp_path / "configurations.json"
    script = ROOT / "benchmarks" / "kernel_configurations.py"
    asked = [
        "--dry-run",
        "--only",
        "int8 B32 4k",
        "--only",
        "int8 B1 prompt",
        "--only",
        "linear SmolLM2 gate",
        "--seconds",
        "6",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *asked],
        env={**os.environ, "KVCOMPILE_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["meaningless"] and len(found["cases"]) == 3
    for name, case in found["cases"].items():
        assert case["now"][:-1] == case["again"][:-1] and case["measured"] >= 2
        assert case["of"] > (3 if "linear" in name else 10)
        assert [row[-1] for row in case["rows"]] == sorted(row[-1] for row in case["rows"])


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    done = run(cache=tmp_path)
    assert done.returncode == 1 and "needs an NVIDIA GPU; --dry-run" in done.stderr
