"""What makes tests of tiny models quick, and Triton's interpreter where no GPU is asked for.

On a few shared cores, the threads of tiny models cost more than they save; so do PyTorch's cache of what operators
make of shapes, which pays where layers repeat, and collecting garbage among the objects of a whole session all the
time: together a quarter of what tests of tracing take. Triton decides at its first import whether kernels are
interpreted, and torch._dynamo imports it, so the variable is set before either; what needs the compiler runs in a
process of its own (`kernels/triton/assemble.py`).

Equal models of transformers are understood once in a session (`tests/understood_once.py`), but in tests of what
understands them.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

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


def _name(path: Path) -> str:
    """A file of tests by its path from here, without `.py`: names alone may be the same in two folders."""
    folder = Path(__file__).parent
    return path.relative_to(folder).with_suffix("").as_posix() if path.is_relative_to(folder) else path.stem


# What looks at how models are understood. Tests that patch anything understand for themselves, too.
ANEW = [
    "test_capture",
    "test_capture_autocast",
    "test_capture_routes",
    "test_capture_sizes",
    "test_capture_state",
    "test_coverage",
    "test_coverage_sizes",
    "test_detect",
    "test_dump",
    "test_dynamic_mask",
    "test_first_day",
    "test_forms",
    "test_functionalize",
    "test_latent",
    "test_modes",
    "test_opaque",
    "test_pass_table",
    "test_positions",
    "test_progress",
    "test_rope",
    "test_scores",
    "test_shared_kv",
    "test_state",
    "test_threads",
    "test_traced_once",
]


@pytest.fixture(autouse=True)
def _understood_once(request: pytest.FixtureRequest) -> None:
    from tests.understood_once import known

    known.begin()
    patches = "monkeypatch" in request.fixturenames  # what is patched must be what runs, and in no other test
    known.on = _name(request.path) not in ANEW and not patches


# The longest files come first, so that no worker is left alone with one of them.
LONGEST = [
    "test_coverage",
    "test_export_onnx",
    "test_compile",
    "test_smollm2",
    "test_triton_models",
    "test_aoti",
    "test_traced_once",
    "test_export_once",
    "test_examples",
    "test_quanto",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(_name(item.path), len(order)))
