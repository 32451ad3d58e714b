"""Modules whose code is written late: called or asked, they are as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.graph import Graph

from kvcompile.passes.capture.capture import capture
from kvcompile.passes.graph_module import unwritten
from tests.support.models import NanoGPT, make


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() * 2


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often code was written."""
    found: list[int] = []
    python_code = Graph.python_code

    def counting(self: Graph, *args: object, **kwargs: object) -> object:
        found.append(1)
        return python_code(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Graph, "python_code", counting)
    return found


def test_code_is_written_when_it_is_called(written: list[int]) -> None:
    x = torch.tensor([-1.0, 2.0])
    with unwritten():
        module = symbolic_trace(Twice())
        assert not written
        node = next(n for n in module.graph.nodes if n.target == "relu")
        node.target = "exp"
        module.recompile()
        assert not written
        torch.testing.assert_close(module(x), x.exp() * 2)
        assert len(written) == 1
        torch.testing.assert_close(module(x), x.exp() * 2)
        assert len(written) == 1
        node.target = "relu"
        module.recompile()
    torch.testing.assert_close(module(x), x.relu() * 2)  # after it as well
    assert len(written) == 2
    assert module.code and GraphModule.recompile.__name__ == "recompile"


def test_what_goes_wrong_inside_leaves_graphs_as_they_were() -> None:
    before = GraphModule.recompile
    with pytest.raises(ValueError, match="inside"), unwritten():
        raise ValueError("inside")
    assert GraphModule.recompile is before


def test_an_export_writes_the_code_of_no_step(written: list[int]) -> None:
    captured = capture(make(NanoGPT))
    assert len(captured.graph_module.graph.nodes) > 20
    assert not written
