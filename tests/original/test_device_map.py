"""Models that accelerate has put onto devices: its hooks are traced through, and what it offloads is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kvcompile
from kvcompile.errors import ModelError
from kvcompile.original.checks import check_model, offloaded
from tests.support.models import tiny_hf

accelerate = pytest.importorskip("accelerate")
PLACES = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "lm_head": "cpu",
}


def test_hooks_that_only_move_are_traced_through() -> None:
    model: Any = accelerate.dispatch_model(tiny_hf("llama"), PLACES, force_hooks=True)
    assert type(model.model.layers[1]._hf_hook).__name__ == "AlignDevicesHook"
    assert not offloaded(model)
    fast: Any = kvcompile.optimize(model, "int8", max_tokens=64, compile={"mode": "none"})
    ids = torch.arange(9)[None] + 3
    plain: Any = kvcompile.optimize(tiny_hf("llama"), "int8", max_tokens=64, compile={"mode": "none"})
    assert torch.equal(fast.generate(ids, max_new_tokens=5), plain.generate(ids, max_new_tokens=5))
    assert model.hf_device_map == PLACES


def test_layers_on_several_devices_are_taken() -> None:
    """As `device_map="auto"` puts them where there are two GPUs; here, fake ones. `tests/runtime/test_over_devices.py`
    runs such a model."""
    model: Any = tiny_hf("llama")
    with FakeTensorMode():
        for number, layer in enumerate(model.model.layers):
            for module in layer.modules():
                for name, weight in module.named_parameters(recurse=False):
                    made = torch.empty(weight.shape, device=f"cuda:{number}")
                    setattr(module, name, torch.nn.Parameter(made, requires_grad=False))
    check_model(model)
    found = kvcompile.estimate(model, "int8", tokens=64)
    assert dict(found.devices) == {"cuda:0": found.bytes // 2, "cuda:1": found.bytes // 2}
    assert "of it on cuda:1" in str(found)


def test_weights_on_the_disk_are_named(tmp_path: Any) -> None:
    places = PLACES | {"model.layers.1": "disk"}
    model = accelerate.dispatch_model(tiny_hf("llama"), places, offload_dir=str(tmp_path), force_hooks=True)
    found = offloaded(model)
    assert len(found) == 9 and all(name.startswith("model.layers.1.") for name in found)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.\S+ and 8 others\): a graph reads weights"):
        kvcompile.optimize(model)
