"""What the benchmark of starts tells of one, whoever started its process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_time.py"


@pytest.mark.parametrize("told", [True, False])
def test_a_start_is_told_since_its_process_began(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo starts a worker itself, and tells it nothing."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import compile_time

    monkeypatch.delenv(compile_time.STARTED, raising=False)
    before = time.time() - compile_time.BEGAN
    if told:
        monkeypatch.setenv(compile_time.STARTED, str(time.time() - 1e6))
    assert compile_time.since_start() >= (1e6 if told else before)
    assert compile_time.since_start() < (2e6 if told else before + 600)


@pytest.mark.slow
def test_a_worker_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCOMPILE_BENCH_STARTED", raising=False)
    command = [sys.executable, str(SCRIPT), "--worker", "ours", "--set", "compile.mode=none"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert 0 < row["first_token"] < row["first_token_of_process"]
