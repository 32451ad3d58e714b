"""benchmarks/kernels.py as it runs on a GPU, with tiny caches in Triton's interpreter: the same code, no figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    only = [part for name in chosen for part in ("--only", name)]
    done = run("--dry-run", *only, "--out", str(out), cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["meaningless"] and "the times mean nothing" in done.stdout
    rows = {row["case"]: row for row in result["cases"]}
    assert len(rows) == 7 and all(row["us"] > 0 and row["bytes"] > 0 for row in rows.values())
    assert rows["bf16 B1 prompt of 8k"]["tflops"] >= 0 and "TFLOPS" in done.stdout
    peers = rows["bf16 B1 32k"]["peers"]
    assert peers["torch SDPA"]["us"] > 0 and peers["FlexAttention"]["us"] > 0
    assert peers["vLLM"].startswith("not installed")
    assert [goal["goal"] for goal in result["goals"]] == [2, 7, 8, 8]
    assert "| bf16 B1 32k |" in done.stdout and "| goal | wanted | reached |" in done.stdout


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
        "--seconds",
        "4",
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
    assert found["meaningless"] and len(found["cases"]) == 2
    for case in found["cases"].values():
        assert case["now"][:-1] == case["again"][:-1] and case["of"] > 10 and case["measured"] >= 2
        assert [row[-1] for row in case["rows"]] == sorted(row[-1] for row in case["rows"])


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    done = run(cache=tmp_path)
    assert done.returncode == 1 and "needs an NVIDIA GPU; --dry-run" in done.stderr
