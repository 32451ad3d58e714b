"""Products with a weight that is turned round: linear layers, with all that these have; others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from kvcompile.compile import gemv

aten = torch.ops.aten
WIDTH = 32
TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "T": aten.numpy_T.default,
    "t": aten.t.default,
    "permute": lambda weight: aten.permute.default(weight, [1, 0]),
}


class Products(nn.Module):
    def __init__(self, form: Callable[[Products, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.stack = nn.Parameter(torch.randn(8, WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return aten.matmul.default(x, weight)  # type: ignore[no-any-return]


def given(form: Callable[[Products, Tensor], Tensor]) -> tuple[Products, GraphModule, list[str]]:
    plain = Products(form)
    module = gemv.give_gemv(symbolic_trace(plain))
    module.graph.lint()
    return plain, module, [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", TURNS)
def test_products_of_one_vector_are_layers_together(name: str, tokens: int) -> None:
    turn = TURNS[name]
    plain, module, calls = given(lambda own, x: matmul(x, turn(own.first)) + matmul(x, turn(own.second)))
    assert "kvcompile.linear_group.default" in calls and len(calls) == 4
    with torch.no_grad():
        x = torch.randn(1, tokens, WIDTH)
        torch.testing.assert_close(module(x), plain(x))


OTHERS: dict[str, Callable[[Products, Tensor], Tensor]] = {
    "not turned": lambda own, x: matmul(x, own.first),
    "turned and computed": lambda own, x: matmul(x, aten.t.default(own.first * 2)),
    "as it was": lambda own, x: matmul(x, aten.permute.default(own.first, [0, 1])),
    "the other way round": lambda own, x: matmul(aten.t.default(own.first), x.transpose(1, 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    plain, module, calls = given(OTHERS[name])
    assert not [call for call in calls if "linear" in call]
    with torch.no_grad():
        x = torch.randn(1, 3, WIDTH)
        assert torch.equal(module(x), plain(x))


@pytest.mark.filterwarnings("ignore:The use of")
def test_a_weight_of_three_dimensions_is_turned_as_the_graph_has_it() -> None:
    plain, module, calls = given(lambda own, x: matmul(x, aten.numpy_T.default(own.stack)))
    assert "kvcompile.linear.default" in calls
    with torch.no_grad():
        x = torch.randn(1, 3, WIDTH)
        assert torch.equal(module(x), plain(x))
