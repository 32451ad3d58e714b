"""Calls in the place of several linear layers: their weights come before them, and before who else reads them."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from kvcompile.compile import gemv

aten = torch.ops.aten
WIDTH = 16


class Weights(nn.Module):
    """Tied: an embedding's weight is a layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.norm = nn.Parameter(torch.rand(WIDTH))


def tied(normed: bool) -> GraphModule:
    """Two layers of one vector, whose weights are fetched at the beginning of the graph and where they are used."""
    graph = Graph()

    def call(target: object, *args: object) -> Node:
        return graph.call_function(target, args)  # type: ignore[arg-type]

    ids, weight = graph.placeholder("ids"), graph.get_attr("tied")
    x = call(aten.embedding.default, weight, ids)
    if normed:
        h = call(aten.add.Tensor, x, call(aten.linear.default, x, graph.get_attr("other")))
        mean = call(aten.mean.dim, call(aten.pow.Tensor_Scalar, h, 2), [-1], True)
        root = call(aten.rsqrt.default, call(aten.add.Tensor, mean, 1e-5))
        x = call(aten.mul.Tensor, graph.get_attr("norm"), call(aten.mul.Tensor, h, root))
    first = call(aten.linear.default, x, weight)
    graph.output((first, call(aten.linear.default, x, graph.get_attr("other"))))
    return GraphModule(Weights(), graph)


@pytest.mark.parametrize("normed", [False, True])
def test_a_weight_that_an_embedding_reads_too(normed: bool) -> None:
    module, ids = tied(normed), torch.tensor([[3, 5]])
    wanted: tuple[Tensor, ...] = module(ids)
    joined = gemv.give_gemv(module, norms=normed)
    joined.graph.lint()
    name = torch.ops.kvcompile.linear_normed if normed else torch.ops.kvcompile.linear_group
    assert [node.target for node in joined.graph.nodes].count(name.default) == 1
    assert [node for node in joined.graph.nodes if node.target is operator.getitem]
    for got, own in zip(joined(ids), wanted, strict=True):
        torch.testing.assert_close(got, own)
