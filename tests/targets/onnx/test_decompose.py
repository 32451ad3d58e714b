"""Each operator that is rewritten node by node gives what it gave, and what is not known is left to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kvcompile.targets.onnx.decompose import decomposed

aten = torch.ops.aten


class Of(nn.Module):
    """A function of two tensors [batch, tokens, 8] and [batch, tokens, 8], as a module."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y, self.table)


def program(function: Callable[..., Any]) -> ExportedProgram:
    given = (torch.randn(3, 5, 8), torch.randn(3, 5, 8))
    sizes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    return torch.export.export(Of(function), given, dynamic_shapes=(sizes, sizes), strict=False)


def _appended(x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    cache = x.clone()
    cache[:, torch.arange(2)] = y[:, :2]
    same = cache.to(torch.float32)  # no other tensor
    same[:, :, :2].copy_(y[:, :, 2:4])
    return cache.mul_(2) + table


CASES: dict[str, tuple[Callable[..., Any], set[Any], set[Any]]] = {
    # what is computed, what is gone, what is there instead
    "bitwise": (
        lambda x, y, _: ((x > 0) & (y > 0)) | (x < y),
        {aten.__and__.Tensor, aten.__or__.Tensor},
        {aten.bitwise_and.Tensor, aten.bitwise_or.Tensor},
    ),
    "cast": (lambda x, y, _: x.to(torch.float64) + y, {aten.to.dtype}, {aten._to_copy.default}),
    "no cast": (lambda x, y, _: x.to(torch.float32) + y, {aten.to.dtype}, set()),
    "flatten": (lambda x, y, _: (x + y).flatten(0, 1), {aten.flatten.using_ints}, {aten.reshape.default}),
    "flatten what is no view": (
        lambda x, y, _: (x + y).transpose(1, 2).flatten(1),
        {aten.flatten.using_ints},
        {aten.reshape.default, aten.sym_size.int},
    ),
    "flatten all": (lambda x, y, _: (x + y).flatten(), {aten.flatten.using_ints}, {aten.reshape.default}),
    "unflatten": (
        lambda x, y, _: (x * y).unflatten(-1, (2, -1)).transpose(1, 2),
        {aten.unflatten.int},
        {aten.reshape.default, aten.sym_size.int},
    ),
    "expand_as": (
        lambda x, y, t: t.expand_as(x) * y,
        {aten.expand_as.default},
        {aten.expand.default, aten.sym_size.int},
    ),
    "chunk": (
        lambda x, y, _: torch.cat([*x.chunk(3, -1), y], -1),
        {aten.chunk.default},
        {aten.split.Tensor},
    ),
    "mT": (lambda x, y, _: (x + y).mT, {aten.mT.default}, {aten.transpose.int}),
    "contiguous": (lambda x, y, _: x.transpose(1, 2).contiguous() + 1, {aten.contiguous.default}, set()),
    "argsort": (
        lambda x, y, _: (x + y).argsort(dim=-1, descending=True, stable=True),
        {aten.argsort.stable},
        {aten.sort.stable},
    ),
    "writes": (
        _appended,
        {aten.index_put_.default, aten.mul_.Tensor, aten.copy_.default, aten.to.dtype},
        {aten.index_put.default, aten.mul.Tensor, aten.slice_scatter.default},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_in_known_operators(name: str) -> None:
    function, gone, instead = CASES[name]
    before = program(function)
    targets = {node.target for node in before.graph.nodes}
    assert gone <= targets
    known = (targets | instead) - gone
    after = decomposed(before, known)
    assert after is not None
    found = {node.target for node in after.graph.nodes if node.op == "call_function"}
    assert instead <= found and not gone & found
    outputs = [spec.arg.name for spec in after.graph_signature.output_specs]
    assert outputs == [node.name for node in after.graph.output_node().all_input_nodes]
    for batch, tokens in ((3, 5), (2, 7)):
        x, y = torch.randn(batch, tokens, 8), torch.randn(batch, tokens, 8)
        tensors = [torch.arange(8.0)] if "b_table" in [n.name for n in after.graph.nodes] else []
        (got,) = after.graph_module(*tensors, x, y)
        assert torch.equal(got, function(x, y, torch.arange(8.0)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, _: torch.square(x) + y,  # not known
        lambda x, y, _: x.movedim(0, 1) + y.movedim(0, 1),  # may be a view, and is made of others
        lambda x, y, table: table.add_(1) + x + y,  # writes into a buffer
    ],
    ids=["unknown", "view", "buffer"],
)
def test_what_is_left_to_torch(function: Callable[..., Any]) -> None:
    before = program(function)
    targets = {node.target for node in before.graph.nodes}
    graph, signature = before.graph, before.graph_signature
    assert decomposed(before, targets - {aten.square.default}) is None
    assert before.graph is graph and before.graph_signature is signature
