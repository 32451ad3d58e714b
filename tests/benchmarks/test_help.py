"""Every benchmark starts, and says what it measures: what one takes of another is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = sorted(path.name for path in FOLDER.glob("*.py") if "ArgumentParser(" in path.read_text("utf-8"))


@pytest.mark.parametrize("name", COMMANDS)
def test_it_says_what_it_measures(name: str) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / name), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
