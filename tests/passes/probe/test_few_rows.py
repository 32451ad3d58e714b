"""Products of few rows, computed the other way round, are what `linear` gives."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from kvcompile.passes.probe import few_rows
from kvcompile.passes.probe.steps import Steps

WIDE, TALL = 256, 384  # of a weight that is large enough
# Of a sum of products, in any order: WIDE terms of about one.
ROUNDING = WIDE * torch.finfo(torch.float32).eps * 4


@pytest.mark.parametrize(
    "shape", [(1,), (2,), (1, 1), (1, 3), (2, 3), (3, 1, 2), (1, 7), (0,), (2, 20)], ids=str
)
@pytest.mark.parametrize("turned", [False, True], ids=["as they are", "the other way round"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_the_same_as_linear(
    shape: tuple[int, ...], biased: bool, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "_is_faster", lambda rows, weight: turned)
    monkeypatch.setattr(few_rows, "_turned", {})
    x, weight = torch.randn(*shape, WIDE), torch.randn(TALL, WIDE)
    bias = torch.randn(TALL) if biased else None
    found, exact = few_rows.linear(x, weight, bias), nn.functional.linear(x.double(), weight.double())
    exact = exact if bias is None else exact + bias
    assert found.shape == exact.shape and found.dtype == x.dtype and found.is_contiguous()
    assert bool(((found - exact).abs() <= ROUNDING).all())


@pytest.mark.parametrize(
    "x, weight",
    [
        (torch.randn(1, WIDE), torch.randn(16, WIDE)),
        (torch.randn(1, WIDE).bfloat16(), torch.randn(TALL, WIDE).bfloat16()),
        (torch.randn(few_rows._FEW + 1, WIDE), torch.randn(TALL, WIDE)),
        (torch.randn(WIDE), torch.randn(WIDE)),
    ],
    ids=["small", "bfloat16", "many rows", "a vector"],
)
def test_all_others_are_left_alone(x: Tensor, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", _never)
    monkeypatch.setattr(few_rows, "_is_faster", _never)
    assert torch.equal(few_rows.linear(x, weight), nn.functional.linear(x, weight))


@pytest.mark.parametrize("slow", ["linear", "around"])
def test_the_faster_way_is_taken_and_measured_once(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def taking(name: str, product: Any) -> Any:
        def run(*given: Any) -> Tensor:
            called.append(name)
            time.sleep(0.02 if name == slow else 0)
            return product(*given)

        return run

    monkeypatch.setattr(few_rows, "LINEAR", taking("linear", few_rows.LINEAR))
    monkeypatch.setattr(few_rows, "_around", taking("around", few_rows._around))
    monkeypatch.setattr(few_rows, "_turned", {})
    x, weight = torch.randn(3, WIDE), torch.randn(TALL, WIDE)
    fast = "around" if slow == "linear" else "linear"
    few_rows.linear(x, weight)
    assert called.count(fast) == 4 and called.count(slow) == 3
    called.clear()
    few_rows.linear(x, weight)
    assert called == [fast]
    few_rows.linear(x[:2], weight)  # of other rows nothing is known
    assert len(called) > 2


def test_a_graph_runs_them_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_is_faster", lambda rows, weight: True)
    monkeypatch.setattr(few_rows, "_turned", {})
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    graph.output((graph.call_function(torch.ops.aten.linear.default, (x, weight)),))
    root = nn.Module()
    root.weight = nn.Parameter(torch.randn(TALL, WIDE))
    steps = Steps(GraphModule(root, graph))
    calls = []
    original = torch.mm

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(torch, "mm", counted)
    given = torch.randn(2, 1, WIDE)
    with torch.no_grad():
        (found,) = steps.run(given)
        assert len(calls) == 1
        exact = nn.functional.linear(given.double(), root.weight.double())
        assert bool(((found - exact).abs() <= ROUNDING).all())


def _never(*_: Any) -> Tensor:
    raise AssertionError("computed the other way round")
