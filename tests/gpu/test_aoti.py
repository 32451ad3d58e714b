"""AOTInductor packages on hardware: the generated kernels are in them, and give what the module gives."""

from __future__ import annotations

import zipfile
from copy import deepcopy
from pathlib import Path

import pytest
import torch

import kvcompile
from kvcompile.targets.aoti.session import Package
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.verify import check_session
from tests.support.exports import small, tiny, written

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("recipe", ["int8", "fp8", "paged", "h2o_int8", "kivi2", "streaming"])
def test_a_package_has_the_kernels_and_is_the_module(
    recipe: str, device: torch.device, tmp_path: Path
) -> None:
    model = deepcopy(tiny(torch.bfloat16, layers=2, head_dim=64)).to(device)
    wanted = small(recipe, compile={"kernels": "triton"})
    source = written(model, tmp_path / "out", "aoti", wanted)
    assert {decision.kernels for decision in source.plan.decisions} == {"triton"}
    with zipfile.ZipFile(tmp_path / "out" / "model.pt2") as package:
        names = package.namelist()
        sources = [package.read(name) for name in names if name.endswith((".cpp", ".so"))]
    assert any(name.endswith(".cubin") for name in names), names
    assert any(b"decode_attention" in source for source in sources), names
    engine = Manifest.read(tmp_path / "out").machine
    assert engine is not None and engine["compute_capability"] == list(
        torch.cuda.get_device_capability(device)
    )
    session = Package(tmp_path / "out")
    check = check_session(session, source)
    eager = kvcompile.optimize(model, small(recipe, compile={"kernels": "triton", "mode": "none"}))
    ids = torch.randint(3, 61, (1, 60), device=device)
    start = 0
    for size in (33, 7, *(1 for _ in range(20))):
        part = ids[:, start : start + size]
        got, expected = session.prefill(part, keep=None).double(), eager(part).logits.double()
        assert (got - expected).square().mean().sqrt() <= check.budget * expected.square().mean().sqrt()
        start += size
