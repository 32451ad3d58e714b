"""Linear layers on a CPU: of one token, a kernel that reads the weights once, in their own dtype.

A matrix-vector product only reads its matrix, and the BLAS behind `aten::mm` is slow at it. Two forms are faster:

| form | what it is | where |
|---|---|---|
| kernel | `kernels/cpp/include/linear.cpp`, sums in fp32 | three dtypes, a C++ compiler, a graph that stays here |
| loop | a product and a sum, which Inductor turns into a threaded, fused loop | else |

For more than one row, which is decided while tracing, the BLAS stays; but where the processor has no products of the
weights' dtype (bfloat16 with AVX2 alone: 18 GFLOP/s beside 110 in float32), and the kernel could run, one of
`kernels/cpp/include/linear_many.cpp` takes its place.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from kvcompile.passes.table import disabled, graph_pass

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_LIB.define("linear_loop(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_KERNELS = (torch.float32, torch.float16, torch.bfloat16)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K] -> [..., N]; sums in fp32."""
    one = _one_token(x)
    if (one or _slow(x.dtype)) and (kernel := _kernel(x, weight, bias)) is not None:
        run = kernel.linear if one else kernel.linear_many
        made: Tensor = run(x.contiguous(), weight, bias)
        return made
    return _loop(x, weight, bias)


def _one_token(x: Tensor) -> bool:
    return x.dtype.is_floating_point and all(isinstance(size, int) and size == 1 for size in x.shape[:-1])


def _slow(dtype: torch.dtype) -> bool:
    return importlib.import_module("kvcompile.kernels.cpp.isa").lacks_products_of(dtype)  # type: ignore[no-any-return]


def _loop(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same without a kernel: in packages that run where there is no compiler."""
    rows = x.shape[:-1]
    if not _one_token(x):
        return F.linear(x, weight, bias)
    out = (x.reshape(1, -1).float() * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).reshape(*rows, weight.shape[0])


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """What launches the kernel, or None where it has none for these."""
    same = x.dtype == weight.dtype and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    if x.device.type != "cpu" or x.dtype not in _KERNELS or not same or weight.stride(-1) != 1:
        return None
    available = importlib.import_module("kvcompile.kernels.cpp.available")
    if available.problem(x.device) is not None:
        return None
    return importlib.import_module("kvcompile.kernels.cpp.host.linear")


_LIB.impl("linear", _linear, "CompositeImplicitAutograd")
_LIB.impl("linear_loop", _loop, "CompositeImplicitAutograd")


NAME = "cpu_gemv"


def with_gemv(module: GraphModule) -> GraphModule:
    """A copy of a region whose linear layers choose their form when they are traced.

    KVCOMPILE_DISABLE=cpu_gemv leaves it out, to bisect.
    """
    return module if disabled(NAME) else give_gemv(copy.deepcopy(module))


@graph_pass("cpu_gemv")
def give_gemv(module: GraphModule, kernels: bool = True) -> GraphModule:
    """The same in place; kernels: whether the form may be a kernel, which is compiled where the graph runs."""
    if disabled(NAME):
        return module
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            ops = torch.ops.kvcompile
            node.target = ops.linear.default if kernels else ops.linear_loop.default
    module.recompile()
    return module
