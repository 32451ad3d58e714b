"""TensorRT engines of layouts that forget: rings, sinks, and retention by scores."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx_bindings")
pytest.importorskip("onnxruntime")
from tests.support.marks import cases
from tests.support.tensorrt_layouts import check_bf16, check_layout

LAYOUTS = (
    "window",
    "sink_window",
    "streaming",
    "streaming_int8",
    "h2o",
    "h2o_int8",
    "sinks_h2o_fp8",
    "tova",
    "snapkv",
    "long_context",
)
FAST = ("h2o",)


@pytest.mark.parametrize("layout", cases(LAYOUTS, FAST))
def test_engines_are_built_and_their_bindings_give_what_the_oracle_gives(layout: str, tmp_path: Path) -> None:
    check_layout(layout, tmp_path / "artifact")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_engines_are_built(layout: str, tmp_path: Path) -> None:
    check_bf16(layout, tmp_path / "artifact")
