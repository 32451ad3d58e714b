"""compute-sanitizer over small cases of every role: accesses out of bounds, races in shared memory, wrong barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.usefixtures("device")
def test_compute_sanitizer(tool: str) -> None:
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )
    if found is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    done = subprocess.run(
        [found, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.small"],
        cwd=ROOT,
        # One allocation for each tensor: else an access beyond one is within the next.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "NOT FINITE" not in done.stdout
