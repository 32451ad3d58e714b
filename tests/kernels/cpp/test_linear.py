"""Linear layers of one token: the kernel against float64, and where it takes the place of the graph's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.compile import gemv
from kvcompile.kernels.cpp.host import ops
from kvcompile.kernels.cpp.host.linear import linear
from kvcompile.kernels.cpp.isa import VARIABLE, available

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def vectors(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows + columns)
    shapes = ((1, 1, columns), (rows, columns), (rows,))
    x, weight, bias = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", [isa.name for isa in available()])
def test_sums_are_those_of_float32(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, isa)
    ops.forget()
    for rows, columns in ((576, 576), (49, 65), (1537, 577), (1, 3), (3, 1), (5, 8192)):
        x, weight, bias = vectors(rows, columns, dtype)
        for own in (bias, None):
            wanted = x.double() @ weight.double().T + (0 if own is None else own.double())
            got = linear(x, weight, own)
            assert got.shape == (1, 1, rows) and got.dtype == dtype
            # A sum in float32, rounded once.
            limit = torch.finfo(dtype).eps * wanted.abs() + columns**0.5 * 2e-6
            assert bool(((got.double() - wanted).abs() <= limit).all())
    ops.forget()


def test_rows_of_a_wider_weight() -> None:
    x, weight, _ = vectors(40, 96, torch.float32)
    part = weight[3:33, :64]
    assert torch.allclose(linear(x[..., :64].contiguous(), part), x[..., :64] @ part.T, atol=1e-5)


def test_channels_that_do_not_lie_together_are_refused() -> None:
    x, weight, _ = vectors(8, 16, torch.float32)
    with pytest.raises(RuntimeError, match="needs the channels of a weight side by side"):
        linear(x[..., ::2].contiguous(), weight[:, ::2])


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, own: torch.dtype | None = None):
        super().__init__()
        self.inner = nn.Linear(8, 6, dtype=own or dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.linear.default(x, self.inner.weight, self.inner.bias)


def traced(x: Tensor, layer: Layer, kernels: bool = True) -> str:
    """The ops of a layer after the pass, as they are traced for x."""
    module = gemv.give_gemv(symbolic_trace(layer), kernels)
    return str(make_fx(module)(x).graph)


def test_one_token_takes_the_kernel_and_more_the_blas() -> None:
    layer = Layer()
    one, two = torch.randn(1, 1, 8), torch.randn(1, 2, 8)
    assert "cpp_linear" in traced(one, layer)
    assert "cpp_linear" not in traced(two, layer)
    assert "cpp_linear" not in traced(one, layer, kernels=False), "what is packaged has no kernel"
    module = gemv.give_gemv(symbolic_trace(layer))
    for x in (one, two):
        assert torch.allclose(module(x), layer(x), atol=1e-6)


def test_no_compiler_takes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcompile.kernels.cpp import available as here

    monkeypatch.setattr(here, "problem", lambda device: "no compiler")
    assert "cpp_linear" not in traced(torch.randn(1, 1, 8), Layer())
    assert "sum" in traced(torch.randn(1, 1, 8), Layer())


def test_other_dtypes_take_the_loop() -> None:
    assert "cpp_linear" not in traced(torch.randn(1, 1, 8).double(), Layer(torch.float64))
