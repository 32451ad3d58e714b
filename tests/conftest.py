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


# What looks at how models are understood. Tests that patch anything understand for themselves, too.
ANEW = [
    "capture",
    "coverage",
    "coverage_sizes",
    "detect",
    "dump",
    "dynamic_mask",
    "first_day",
    "forms",
    "functionalize",
    "latent",
    "modes",
    "opaque",
    "pass_table",
    "positions",
    "progress",
    "rope",
    "scores",
    "shared_kv",
    "state",
    "threads",
    "traced_once",
]


@pytest.fixture(autouse=True)
def _understood_once(request: pytest.FixtureRequest) -> None:
    from tests.understood_once import known

    name = request.path.stem.removeprefix("test_")
    known.begin()
    patches = "monkeypatch" in request.fixturenames  # what is patched must be what runs, and in no other test
    known.on = name not in ANEW and not name.startswith("capture_") and not patches


# The longest files come first, so that no worker is left alone with one of them.
LONGEST = [
    "coverage",
    "export_onnx",
    "compile",
    "smollm2",
    "triton_models",
    "aoti",
    "traced_once",
    "export_once",
    "examples",
    "quanto",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
