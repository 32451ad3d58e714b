"""A linear layer of one token by the C++ kernel."""

from __future__ import annotations

from torch import Tensor

from kvcompile.kernels.cpp.host import ops, source


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, .., K], weight [N, K], bias [N], all of one dtype, rows dense -> [1, .., N].

    Raises:
        KernelError: the kernel cannot be compiled.
    """
    ops.ready()
    out: Tensor = ops.cpp_linear(x, weight, bias, source.linear_spec(x.dtype))
    return out
