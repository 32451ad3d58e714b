"""Tests of generated kernels on hardware: `make test ARGS="-m gpu"`. Without an NVIDIA GPU they skip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No measured table of this machine, and memory of the test before given back."""
    folder: Path = tmp_path_factory.getbasetemp() / "kvcompile"
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(folder))
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
