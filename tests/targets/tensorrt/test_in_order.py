"""TensorRT engines of layouts that keep every token: contiguous and paged, in every storage."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx_bindings")
pytest.importorskip("onnxruntime")
from tests.support.marks import cases
from tests.support.tensorrt_layouts import check_bf16, check_layout

LAYOUTS = (
    "baseline",
    "int8",
    "fp8",
    "int4",
    "nf4",
    "mxfp4",
    "kivi2",
    "kivi4",
    "quest",
    "paged",
    "paged_int8",
    "chat",
)
FAST = ("chat",)  # what `baseline` updates in place, `test_session.py` does


@pytest.mark.parametrize("layout", cases(LAYOUTS, FAST))
def test_engines_are_built_and_their_bindings_give_what_the_oracle_gives(layout: str, tmp_path: Path) -> None:
    check_layout(layout, tmp_path / "artifact")


@pytest.mark.parametrize("layout", cases(LAYOUTS, ("baseline",)))
def test_bf16_engines_are_built(layout: str, tmp_path: Path) -> None:
    check_bf16(layout, tmp_path / "artifact")
