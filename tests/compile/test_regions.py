"""Cutting a graph into regions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from kvcompile.compile.regions import cut


class Split(nn.Module):
    """One call whose results are used on both sides of a site, and after it alone."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = torch.split(x, 2, -1)
        y = torch.relu(a.sin())  # the site
        z = torch.relu(y + b)  # another
        return z * c + torch.split(x.cos(), 2, -1)[1]


def test_no_list_leaves_a_region() -> None:
    """Inductor takes regions whose results are tensors."""
    module = symbolic_trace(Split())
    x = torch.randn(3, 6)
    regions = cut(module, lambda node: node.target is torch.relu)
    assert len(regions.calls) == 3
    values = {"x": x}
    for call in regions.calls:
        results = regions.modules[call.region](*[values[name] for name in call.inputs])
        assert all(isinstance(result, Tensor) for result in results)
        values |= dict(zip(call.outputs, results, strict=True))
    assert torch.equal(values[regions.outputs[0]], Split()(x))
