"""What of a step of one token is for several threads: large loops, and no norm or activation of a vector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache, run_and_get_cpp_code
from torch.fx import symbolic_trace

from kvcompile.compile.inductor import SERIAL, ShapeClass, Tracer, compile_region


class Between(nn.Module):
    """What stands between linear layers."""

    def forward(self, x: Tensor, gate: Tensor) -> tuple[Tensor]:
        own = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return (own * gate / (1 + torch.exp(-gate)),)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    with fresh_cache():
        yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("batch", "tokens", "size", "threads"),
    [
        (True, True, 8192, False),
        (True, True, 4 * SERIAL, True),  # such as logits of a large vocabulary
        (True, False, 8192, True),
        (False, True, 8192, True),
    ],
)
def test_what_several_threads_do(batch: bool, tokens: bool, size: int, threads: bool) -> None:
    tracer = Tracer(ShapeClass(batch, tokens, True, 64))
    given = [
        tracer.empty((tracer.batch, tracer.tokens, size), torch.float32, torch.device("cpu"))
        for _ in range(2)
    ]
    module = symbolic_trace(Between())
    made, text = run_and_get_cpp_code(lambda: compile_region(module, given, tracer, "default"))
    assert "at::vec" in text or "std::exp" in text, "the code is found"
    assert ("#pragma omp parallel" in text) == threads
    x, gate = (torch.randn(1 if batch else 2, 1 if tokens else 2, size) for _ in range(2))
    assert torch.allclose(made(x, gate)[0], Between()(x, gate)[0], rtol=1e-4, atol=1e-5)
