"""A transfer function that is added to the table has everything: models with its operator, and the property tests.

It does what the section "Add a transfer function" of CONTRIBUTING.md says, and nothing else.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import kvcompile
from kvcompile.errors import DetectionError
from kvcompile.passes.dependence import Dependence, Level, analysis
from kvcompile.passes.dependence.context import Context, Result, arguments
from kvcompile.passes.dependence.facts import anything
from kvcompile.passes.dependence.pointwise import as_values, told
from tests.support.dependence_graphs import Args, Builder, Template, grown, violations
from tests.support.dependence_templates import TEMPLATES
from tests.support.models import NanoGPT, make

NAME = "kvtest_transfer::peak_scaled"


@torch.library.custom_op(NAME, mutates_args=())
def peak_scaled(x: Tensor, dim: int) -> Tensor:
    """x / (1 + max |x|), the maximum over one dimension."""
    return x / (1 + x.abs().amax(dim, keepdim=True))


@peak_scaled.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x)


def of_peaks(ctx: Context, node: Node) -> Result:
    """Over channels the result is of the operand's token; over rows or tokens it is of all of them."""
    source = ctx.fact(node.args[0])
    if source.level == Level.ANYTHING:
        return as_values(node, source)
    dim = arguments(node)["dim"] % len(source.dims)
    if not source.only_free(dim):
        return anything(node, f"the peak of {told(source)} along rows or tokens", (source,))
    return source.plain()


def careless(ctx: Context, node: Node) -> Result:
    """The same, and the dimension is not looked at."""
    source = ctx.fact(node.args[0])
    return as_values(node, source) if source.level == Level.ANYTHING else source.plain()


def called(b: Builder) -> tuple[object, Args, dict[str, object]]:
    x = b.floating()
    return torch.ops.kvtest_transfer.peak_scaled.default, (x, b.dim(x)), {}


TEMPLATE = Template(NAME, called)  # type: ignore[arg-type]
FEW = [t for t in TEMPLATES if t.key in ("aten::mul", "aten::unsqueeze", "aten::transpose", "aten::add")]


class Scaled(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return peak_scaled(x, self.dim)


def model_of(dim: int) -> NanoGPT:
    """The operator on the embeddings [B, S, C], from which every key and value is made."""
    model = make(NanoGPT)
    assert isinstance(model, NanoGPT)
    model.wte = nn.Sequential(model.wte, Scaled(dim))  # type: ignore[assignment]
    return model


RECIPE = {"cache": {"keys": {"dtype": "model"}}, "compile": {"mode": "none"}}


def test_a_new_function_needs_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(-1)
    with pytest.raises(
        DetectionError, match=r"kvtest_transfer\.peak_scaled.*what it does to tokens is not known"
    ):
        kvcompile.optimize(model, RECIPE, max_tokens=64)
    monkeypatch.setitem(analysis.RULES, NAME, of_peaks)
    fast = kvcompile.optimize(model, RECIPE, max_tokens=64)  # which verifies it
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cached = torch.cat([fast(ids[:, :20]), *(fast(ids[:, i : i + 1]) for i in range(20, 24))], dim=1)
        torch.testing.assert_close(cached, model(ids), rtol=1e-4, atol=1e-5)


def test_a_near_miss_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(analysis.RULES, NAME, of_peaks)
    with pytest.raises(DetectionError, match=r"the peak of \[batch, token, 48\] along rows or tokens"):
        kvcompile.optimize(model_of(1), RECIPE, max_tokens=64)


def found_wrong() -> list[str]:
    """What random graphs show of the operator, over every dimension of many kinds of operands."""
    found: list[str] = []
    for seed in range(12):
        found += violations(grown(seed, FEW, random.Random(seed).randrange(3), TEMPLATE).finish(), seed)
    return found


def test_property_tests_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dependence, "strict", True)
    monkeypatch.setitem(analysis.RULES, NAME, of_peaks)
    assert found_wrong() == []
    monkeypatch.setitem(analysis.RULES, NAME, careless)
    assert any("peak_scaled" in text for text in found_wrong())
