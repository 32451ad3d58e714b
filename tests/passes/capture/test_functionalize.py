"""Functionalize: a graph with in-place operators and the same without compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kvcompile.passes.capture.functionalize import functionalize, mutates
from kvcompile.passes.graph import target_name


class Code(nn.Module):
    def __init__(self, code: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.code = code
        self.table = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.code(x, y)


def assembled(x: Tensor, y: Tensor) -> Tensor:
    """As latent attention builds its keys."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] + y.shape[-1])
    out[..., : x.shape[-1]] = x
    out[..., x.shape[-1] :] = y
    return out * 2


def partly(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., 1:3] = y[..., 1:3]
    return out + x


def read_between(x: Tensor, y: Tensor) -> Tensor:
    z = x + 1
    before = z * 3
    z.mul_(y)
    view = z[:, 0]
    view.add_(1.0)
    z[:, 1].copy_(y[:, 1])
    return before + z + view.unsqueeze(1)


def through_views(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z.transpose(0, 1)[0] = y[:, 0]
    z.unsqueeze(0).permute(0, 2, 1, 3)[0, 1] = y[:, 1]
    return z


def old_view(x: Tensor, y: Tensor) -> Tensor:
    """A view that was taken before the write shows what was written."""
    z = x.clone()
    row = z[:, 2]
    z[:, 2:] = y[:, 2:]
    return row + z.sum(1)


def copied_from(x: Tensor, y: Tensor) -> Tensor:
    """What was copied is not what its source becomes."""
    z, w = torch.empty_like(x), y + 1
    z.copy_(w)
    w.zero_()
    return z + w


def promoted(x: Tensor, y: Tensor) -> Tensor:
    count = torch.zeros(x.shape[0], x.shape[1], dtype=torch.int64)
    count.add_(x.sum(-1) > 0)
    return x + count.unsqueeze(-1)


def routed(x: Tensor, y: Tensor) -> Tensor:
    """As routers are written."""
    top, index = x.topk(2, dim=-1)
    top /= top.sum(-1, keepdim=True)
    mask = torch.zeros_like(x).scatter_(-1, index, 1.0)
    return (mask.masked_fill(mask == 0, -1.0) + y) * top.sum(-1, keepdim=True)


CODES = (assembled, partly, read_between, through_views, old_view, copied_from, promoted, routed)


def traced(code: Callable[[Tensor, Tensor], Tensor]) -> GraphModule:
    x, y = torch.zeros(3, 5, 4), torch.zeros(3, 5, 4)
    free = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Code(code), (x, y), dynamic_shapes=(free, free), strict=False)
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module


@pytest.mark.parametrize("code", CODES)
def test_values_stay(code: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = traced(code)
    assert mutates(module)
    assert functionalize(module) == ""
    module.recompile()
    assert not mutates(module)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 5, 4, generator=generator) for _ in range(2))
    given = (x.clone(), y.clone())
    torch.testing.assert_close(module(x, y), code(x, y), rtol=0, atol=0)
    assert torch.equal(x, given[0]) and torch.equal(y, given[1])


def test_pieces_that_fill_new_memory_are_a_cat() -> None:
    module = traced(assembled)
    functionalize(module)
    module.graph.eliminate_dead_code()
    names = [target_name(node) for node in module.graph.nodes if node.op == "call_function"]
    assert "cat" in names and "slice_scatter" not in names and "new_empty" not in names


def test_what_is_written_in_part_is_no_cat() -> None:
    module = traced(partly)
    functionalize(module)
    assert "cat" not in {target_name(node) for node in module.graph.nodes if node.op == "call_function"}


def shaped_view(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z.view(-1)[:4] = 1.0
    return z


def written_input(x: Tensor, y: Tensor) -> Tensor:
    y = x.mul_(2)
    return y + 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [(shaped_view, "memory is read through aten.view.default"), (written_input, "x, an input or a weight")],
)
def test_what_is_not_understood_is_left_to_torch(
    code: Callable[[Tensor, Tensor], Tensor], reason: str
) -> None:
    assert reason in functionalize(traced(code))
