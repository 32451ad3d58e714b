"""Linear layers by C++ kernels: of one token, and of more where `isa.multiplies_rows`."""

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


MOST = 16  # layers of one token at a time: MOST_LAYERS of `include/call.h`


def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """Layers of the same x [1, .., K] in one call; biases: none, or of each. Their results, as `linear`.

    Raises:
        KernelError: the kernel cannot be compiled.
    """
    ops.ready()
    whole: Tensor = ops.cpp_linears(x, weights, biases, source.linear_spec(x.dtype))
    return list(whole.split([weight.shape[0] for weight in weights], -1))


def linear_many(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] dense, weight [N, K], bias [N], all of one dtype, rows dense -> [.., N]; sums in fp32.

    Raises:
        KernelError: the kernel cannot be compiled.
    """
    ops.ready()
    out: Tensor = ops.cpp_linear(x, weight, bias, source.linear_spec(x.dtype, many=True))
    return out
