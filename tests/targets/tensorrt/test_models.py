"""Attention that is not plain as TensorRT engines: softcap, biases, learned positions, windows behind pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorrt_rtx_bindings")
pytest.importorskip("onnxruntime")
from tests.support.exports import small, tiny, written
from tests.support.tensorrt_layouts import LIMITS, PACKAGE, check_bindings

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({}, "baseline"),  # softcap, which TensorRT's attention has not; windows in rings
    "bloom": ({"n_head": 4}, "int8"),  # ALiBi
    "gpt2": ({"n_embd": 128, "n_head": 4}, "h2o"),  # learned positions
    "mistral": ({}, "chat"),  # a window behind pages
}
FAST = ()  # quick ones are in test_in_order.py and test_forgetting.py


@pytest.mark.parametrize(
    "kind", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_kinds_of_attention(kind: str, tmp_path: Path) -> None:
    changes, recipe = KINDS[kind]
    model = tiny(kind=kind, **changes)
    source = written(model, tmp_path / "out", "tensorrt", small(recipe, **LIMITS), package=PACKAGE)
    check_bindings(tmp_path / "out", source)
