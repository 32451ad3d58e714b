"""What makes tests of tiny models quick, and Triton's interpreter where no GPU is asked for.

On a few shared cores, the threads of tiny models cost more than they save; so do PyTorch's cache of what operators
make of shapes, which pays where layers repeat, and collecting garbage among the objects of a whole session all the
time: together a quarter of what tests of tracing take. Triton decides at its first import whether kernels are
interpreted, and torch._dynamo imports it, so the variable is set before either; what needs the compiler runs in a
process of its own (`kernels/triton/assemble.py`).
"""

from __future__ import annotations

import gc
import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    asked = str(config.getoption("markexpr")).replace("not gpu", "")
    if "gpu" not in asked and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _quick() -> None:
    import torch._dynamo.config  # imports Triton: not before `pytest_configure`

    torch.set_num_threads(1)
    torch._dynamo.config.fake_tensor_cache_enabled = False
    gc.set_threshold(100_000, 50, 100)
