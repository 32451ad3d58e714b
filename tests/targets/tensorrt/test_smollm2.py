"""SmolLM2 itself as a TensorRT engine: built, and its graph generates what the model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.errors import ModelError
from kvcompile.models import load_model
from kvcompile.targets.tensorrt.session import Engine

pytest.importorskip("tensorrt_rtx_bindings")
pytest.importorskip("onnxruntime")
from tests.support.tensorrt_fake import Fake

LIMITS = {"max_tokens": 256, "max_batch": 1, "prefill_chunk": 64}
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def loaded() -> Any:
    try:
        return load_model("smollm2", "float16")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["baseline", "int8", "paged"])
def test_an_engine_of_smollm2(loaded: Any, recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    manifest = kvcompile.export(
        loaded.model,
        folder,
        "tensorrt",
        recipe=recipe,
        tokenizer=loaded.tokenizer,
        verify="off",
        options={"compute_capabilities": ["SM89"]},
        **LIMITS,
    )
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    assert (folder / "step.engine").stat().st_size > 0.9 * weights
    in_place = [alias.in_place for alias in manifest.graphs[0].aliases]
    assert in_place == [recipe == "baseline"] * len(in_place)
    fake = Fake(folder)
    engine = Engine(folder, device="cpu", trt=fake.trt, gpu=fake.gpu)
    eager = kvcompile.optimize(loaded.model, recipe=recipe, compile={"mode": "none"}, verify="off", **LIMITS)
    ids = loaded.tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        want = eager.generate(ids, max_new_tokens=24, do_sample=False)
    got = engine.generate(ids, max_new_tokens=24)
    assert torch.equal(got, want)
    text = engine.generate(PROMPT, max_new_tokens=24)
    assert "Paris" in text
