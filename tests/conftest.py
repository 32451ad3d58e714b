"""One thread, and Triton's interpreter where no GPU is asked for.

On a few shared cores, the threads of tiny models cost more than they save. Triton decides at its first import whether
kernels are interpreted, so the variable is set before any test is collected; what needs the compiler runs in a process
of its own (`kernels/triton/assemble.py`).
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    asked = str(config.getoption("markexpr")).replace("not gpu", "")
    if "gpu" not in asked and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
