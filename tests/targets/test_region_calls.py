"""Calls of one region (`kvcompile/targets/region_calls.py`): one that is like an earlier one is not traced again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.targets.region_calls import RegionCalls


class Halved(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return ((x * 0.5).tanh(),)


def traced(first: Tensor, second: Tensor) -> GraphModule:
    """The trace of a region that is called with both."""
    calls = object.__new__(RegionCalls)
    calls.modules = (symbolic_trace(Halved()),)
    calls._often, calls._firsts, calls._count = {0}, {}, 0

    def both(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        (a,), _ = calls._call(0, [one], [])
        (b,), _ = calls._call(0, [other], [])
        return a, b

    return make_fx(both, tracing_mode="fake")(first, second)


def again(module: GraphModule) -> int:
    return sum("again" in str(node.target) for node in module.graph.nodes)


def test_a_call_that_is_alike_is_not_traced_again() -> None:
    assert again(traced(torch.randn(2, 4), torch.randn(2, 4))) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.randn(2, 6),
        lambda: torch.randn(2, 4, dtype=torch.float64),
        lambda: torch.randn(4, 2).T,
    ],
    ids=["another size", "another dtype", "other strides"],
)
def test_one_that_differs_is(other: Callable[[], Tensor]) -> None:
    """Its own operators are in the graph: what the first one makes has another form."""
    found = traced(torch.randn(2, 4), other())
    assert again(found) == 0
    assert sum(node.target is torch.ops.aten.tanh.default for node in found.graph.nodes) == 2
