"""Equal regions are translated once: the ONNX graphs are those of translating every region."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from kvcompile.kernels.shared.dialect import ONNX
from kvcompile.passes.capture.traced_once import NotOnce
from kvcompile.recipe import Recipe
from kvcompile.targets.functional import example, functional
from kvcompile.targets.onnx import graph
from kvcompile.targets.onnx.session import Session
from kvcompile.targets.region_calls import RegionCalls
from kvcompile.targets.source import source_of
from kvcompile.targets.verify import check_session
from tests.support.exports import small, tiny, written
from tests.support.marks import cases

onnxruntime = pytest.importorskip("onnxruntime")
PHASES = ("prefill", "decode")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many regions were copied in each graph."""
    found: list[int] = []
    expand = graph.expand

    def counting(model: ir.Model) -> int:
        found.append(expand(model))
        return found[-1]

    monkeypatch.setattr(graph, "expand", counting)
    return found


def operators(model: ir.Model) -> Counter[str]:
    """How many there are of each operator."""
    return Counter(n.op_type for n in model.graph)


# kind, changes, recipe, and how many regions are copied: of n layers, two less (of two kinds in turns, four).
CASES: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "baseline": ("llama", {"layers": 3}, "baseline", 1),
    # The same operators on weights of two sizes: of three regions between attention, the first and the last are equal.
    "widths": ("llama", {"layers": 4}, "baseline", 1),
    "int8": ("llama", {"layers": 3}, "int8", 1),
    "pages": ("llama", {"layers": 4}, "paged_int8", 2),
    "rings": ("llama", {"layers": 4}, "streaming_int8", 2),
    "scores": ("llama", {"layers": 4}, "h2o", 2),
    "residuals": ("llama", {"layers": 4}, "kivi4", 2),
    "columns of weights": ("gpt2", {"n_embd": 128, "n_head": 4, "layers": 4}, "int8", 2),
    "experts": ("mixtral", {"layers": 4}, "baseline", 2),
    "two kinds": (
        "gemma3",
        {"layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
        "int8",
        2,
    ),
}


def narrower(mlp: nn.Module) -> nn.Module:
    """The same module with half of its intermediate channels."""
    made = copy.deepcopy(mlp)
    for name, layer in made.named_children():
        if isinstance(layer, nn.Linear):
            rows, columns = layer.weight.shape
            cut = layer.weight[:, : columns // 2] if name == "down_proj" else layer.weight[: rows // 2]
            layer.weight = nn.Parameter(cut.detach().clone())
    return made


def ran(model: ir.Model, given: Sequence[Tensor]) -> list[Tensor]:
    """What a graph gives in ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    text = ir.serde.serialize_model(model).SerializeToString()
    session = onnxruntime.InferenceSession(text, options)
    known = {i.name: x.numpy() for i, x in zip(session.get_inputs(), given, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, known)]


def of(case: str) -> tuple[nn.Module, Recipe]:
    kind, changes, recipe, _ = CASES[case]
    model = tiny.__wrapped__(kind=kind, **changes)
    if case == "widths":
        for layer in model.model.layers[1::2]:
            layer.mlp = narrower(layer.mlp)
    return model, small(recipe)


@pytest.mark.slow  # quick is that copies give what translating every region gives
@pytest.mark.parametrize("case", CASES)
def test_copies_give_what_the_oracle_gives(case: str, tmp_path: Path) -> None:
    model, recipe = of(case)
    source = written(model, tmp_path / "once", "onnx", recipe)
    check_session(Session(tmp_path / "once", threads=1), source)


# Of a step, and of a prompt.
ONCE = [(case, one) for one in (True, False) for case in CASES]


@pytest.mark.parametrize(("case", "one"), cases(ONCE, [("baseline", True)]))
def test_the_graphs_are_the_same(
    case: str, one: bool, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recipe = of(case)
    source = source_of(model, recipe, lambda *_: None, {}, "onnx")
    first = graph._model(functional(source.front, source.plan, ONNX), one, graph.OPSET)
    assert copies == [CASES[case][-1]]

    def every(self: RegionCalls, *args: Any) -> None:
        original(self, *args)
        self._often = set()

    original = RegionCalls.__init__
    monkeypatch.setattr(RegionCalls, "__init__", every)
    function = functional(source.front, source.plan, ONNX)
    second = graph._model(function, one, graph.OPSET)
    assert copies[1:] == [0]
    once, each = operators(first), operators(second)
    assert once <= each  # and some that are equal are one
    assert sum(each.values()) - sum(once.values()) <= 16
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(x.shape, generator=generator) if x.is_floating_point() else x
        for x in example(function, one)
    ]
    given[0] = torch.arange(3, 3 + given[0].numel()).view_as(given[0])
    for ours, theirs in zip(ran(first, given), ran(second, given), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_half_precision(copies: list[int], tmp_path: Path) -> None:
    source = written(tiny(torch.float16, layers=4), tmp_path / "out", "onnx", small("int8"))
    assert copies == [2, 2]
    check_session(Session(tmp_path / "out", threads=1), source)


@pytest.mark.slow  # every region is translated in the test above, too
def test_what_cannot_be_copied_is_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: ir.Model) -> int:
        raise NotOnce("no")

    monkeypatch.setattr(graph, "expand", refuse)
    source = written(tiny(layers=3), tmp_path / "out", "onnx", small("baseline"))
    check_session(Session(tmp_path / "out", threads=1), source)
    for phase in PHASES:
        assert not {
            n.op_type for n in ir.load(tmp_path / f"out/{phase}.onnx").graph if n.domain == "kvcompile"
        }
