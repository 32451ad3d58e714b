"""Composite operators on fake tensors keep the symbols of sizes, on any device and with every supported torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.compile.inductor import ShapeClass, Tracer
from kvcompile.util.faking import faking

HEADS, DIM = 4, 48
Made = Callable[..., Tensor]
OPERATORS: dict[str, Callable[[Made], Tensor]] = {
    "linear": lambda of: F.linear(of(DIM), of.weight),  # type: ignore[attr-defined]
    "matmul": lambda of: of(HEADS, DIM) @ of(HEADS, DIM).transpose(-1, -2),
    "attention": lambda of: F.scaled_dot_product_attention(
        *(of(heads, DIM) for heads in (HEADS, 2, 2)), is_causal=True, enable_gqa=True
    ),
}


def devices() -> list[str]:
    """Fake tensors of a GPU need a torch that was built for one, and no GPU."""
    return ["cpu", *(["cuda"] if torch.version.cuda else [])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", OPERATORS)
def test_sizes_stay_free(name: str, device: str, dtype: torch.dtype) -> None:
    tracer = Tracer(ShapeClass(False, False, True))

    def of(*sizes: int) -> Tensor:
        shape = (tracer.batch, *sizes[:-1], tracer.tokens, sizes[-1])
        return tracer.empty(shape, dtype, torch.device(device))

    of.weight = tracer.empty((DIM, DIM), dtype, torch.device(device))  # type: ignore[attr-defined]
    with faking(tracer.mode):
        out = OPERATORS[name](of)
    assert not tracer.env.replacements
    assert out.shape[0] == tracer.batch and not tracer.env.replacements
