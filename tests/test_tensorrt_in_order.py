"""TensorRT engines of layouts that keep every token: contiguous and paged, in every storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings")
pytest.importorskip("onnxruntime")
from tests.tensorrt_layouts import check_layout, export

LAYOUTS = ("contiguous", "int8", "fp8", "int4", "kivi2", "kivi4", "paged", "paged_int8")
BF16 = ("contiguous",)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_is_built_and_its_bindings_give_the_numbers_of_the_model(
    layout: str, tmp_path: Path
) -> None:
    check_layout(layout, tmp_path / "artifact")


@pytest.mark.parametrize(
    "layout", [name if name in BF16 else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_bf16_engines_are_built(layout: str, tmp_path: Path) -> None:
    manifest = export(tmp_path / "artifact", layout, torch.bfloat16, ("SM89",))
    assert manifest.engine is not None and manifest.engine["compute_capabilities"] == ["SM89"]
    assert manifest.graphs[0].outputs[0].dtype == "bfloat16"
    assert all((tmp_path / "artifact" / graph.file).stat().st_size > 10_000 for graph in manifest.graphs)
