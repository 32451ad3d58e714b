"""Opaque modules: Python that depends on values runs as it is; the rest of the model is captured around it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import CaptureError, DetectionError
from kvcompile.kernels.ops import opaque
from kvcompile.kernels.ops.opaque import Dim, TensorSpec
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.graph import target_name
from tests.coverage.configs import tiny_model
from tests.support.models import NanoBlock, TinyConfig

SIZES = TinyConfig()
WIDTH = SIZES.num_heads * SIZES.head_dim
EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "max_tokens": 64, "max_batch": 4}


class Experts(nn.Module):
    """Each token goes to the expert that its router likes; only experts that were hit run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, choice: Tensor, *, unused: Tensor | None = None) -> dict[str, Tensor]:
        out = torch.zeros_like(x)
        for expert in choice.unique().tolist():
            rows = (choice == expert).nonzero(as_tuple=True)
            out[rows] = self.experts[expert](x[rows])
        return {"out": out}


class Leaky(Experts):
    """Gives every token what the first one gets, too."""

    def forward(self, x: Tensor, choice: Tensor, *, unused: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(x, choice)
        return {"out": found["out"] + found["out"][:, :1]}


class Shrinking(Experts):
    """Returns the rows that the first expert got: how many depends on the values."""

    def forward(self, x: Tensor, choice: Tensor, *, unused: Tensor | None = None) -> dict[str, Tensor]:
        super().forward(x, choice)
        return {"out": x[choice == 0]}


class Routed(nn.Module):
    def __init__(self, experts: type[Experts] = Experts, layers: int = 2):
        super().__init__()
        self.wte, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)
        self.blocks = nn.ModuleList(NanoBlock(SIZES, eager=False) for _ in range(layers))
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(experts() for _ in range(layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x)
            choice = self.router(x).argmax(-1)
            found = experts(x, choice, unused=x.sum(-1))["out"]
            x = x + (found if found.shape == x.shape else found.sum(0))
        return self.head(x)


def routed(experts: type[Experts] = Experts) -> Routed:
    torch.manual_seed(0)
    return Routed(experts).eval()


def tokens(batch: int, count: int) -> Tensor:
    return torch.randint(0, 61, (batch, count), generator=torch.Generator().manual_seed(0))


def test_value_dependent_python_runs_as_it_is() -> None:
    model = routed()
    fast = kvcompile.optimize(model, **EAGER)
    ids = tokens(3, 15)
    with torch.no_grad():
        wanted = model(ids)
    for chunks in ((15,), (6, 1, 1, 7), (1,) * 15):
        fast.reset()
        found = torch.cat([fast(part) for part in ids.split(chunks, dim=1)], dim=1)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    text = str(kvcompile.explain(fast))
    assert "experts.* (Experts) runs as Python, 2 of them" in text
    assert any("experts.0, experts.1 will run as Python" in reason for reason in fast.analysis.reasons)


def test_shapes_are_learnt_and_what_is_ignored_is_dropped() -> None:
    captured = capture(routed())
    assert [record.path for record in captured.opaques] == ["experts.0", "experts.1"]
    record = captured.opaques[0]
    row = (Dim(1, "B"), Dim(1, "S"), Dim(WIDTH))
    assert record.inputs == (TensorSpec(row, torch.float32), TensorSpec(row[:2], torch.int64))
    assert record.outputs == (TensorSpec(row, torch.float32),)
    assert record.kept == (0, 1), "the sum is not used"
    assert "sum" not in {target_name(node) for node in captured.graph_module.graph.nodes}


def test_compiled_and_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_DUMP", str(tmp_path))
    model = routed()
    fast = kvcompile.optimize(model, max_tokens=64)
    ids = tokens(1, 9)
    with torch.no_grad():
        wanted = model(ids)
    found = torch.cat([fast(part) for part in ids.split((6, 3), dim=1)], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    (folder,) = tmp_path.iterdir()
    assert "experts.0 (Experts)" in (folder / "opaque.txt").read_text("utf-8")
    dumped = [path.read_text("utf-8") for path in folder.glob("4_region_*.py")]
    assert sum("it calls a module as Python" in text.splitlines()[0] for text in dumped) == 2


def test_transformers_experts_with_flattened_tokens() -> None:
    model = tiny_model("dbrx")
    fast: Any = kvcompile.optimize(model, **EAGER)
    assert {record.path for record in fast.program.opaques} == {
        f"transformer.blocks.{i}.ffn.experts" for i in (0, 1)
    }
    ids = tokens(2, 12)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    found = torch.cat([fast(part).logits for part in ids.split((5, 1, 6), dim=1)], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_an_opaque_module_that_mixes_tokens_is_refused() -> None:
    with pytest.raises(DetectionError, match=r"tokens mix outside attention.*\n?.*experts\.0"):
        kvcompile.optimize(routed(Leaky), **EAGER)


def test_a_result_of_unknown_size_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"experts\.0 would have to run as Python, but dimension 0 of result 0 is"
    ):
        kvcompile.optimize(routed(Shrinking), **EAGER)


@pytest.mark.parametrize("experts", [Experts, Shrinking])
def test_the_model_is_left_as_it_was(experts: type[Experts]) -> None:
    model = routed(experts).train()
    model.experts[0].eval()
    own = lambda *args, **kwargs: type(model.experts[1]).forward(model.experts[1], *args, **kwargs)  # noqa: E731
    model.experts[1].forward = own  # a user's own wrapper
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    try:
        fast = kvcompile.optimize(model, **EAGER)
        fast(tokens(2, 3))
    except CaptureError:
        assert experts is Shrinking
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert {n: v.keys() for n, v in after.items()} == {n: v.keys() for n, v in before.items()}
    assert all(after[n][k] is v for n in before for k, v in before[n].items())
    assert model.experts[1].forward is own


def test_modules_run_in_eval_mode_with_the_models_flags_kept() -> None:
    class Noisy(Experts):
        def forward(self, x: Tensor, choice: Tensor, *, unused: Tensor | None = None) -> dict[str, Tensor]:
            found = super().forward(x, choice)["out"]
            return {"out": nn.functional.dropout(found, 0.5, self.training)}

    model = routed(Noisy).train()
    fast = kvcompile.optimize(model, **EAGER)
    ids = tokens(2, 6)
    found = fast(ids)
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(found, model.eval()(ids), rtol=1e-4, atol=1e-5)


def test_keys_mean_nothing_without_their_owner() -> None:
    captured = capture(routed())
    keys = [record.key for record in captured.opaques]
    assert opaque.find(keys[0]).path == "experts.0"
    del captured
    gc.collect()
    for key in keys:
        with pytest.raises(RuntimeError, match="keep the captured"):
            opaque.find(key)
