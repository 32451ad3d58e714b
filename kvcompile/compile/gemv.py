"""Linear layers of one token on a CPU: a product and a sum, which Inductor turns into a threaded, fused loop.

A matrix-vector product only reads its matrix once. The BLAS behind `aten::mm` reached 8-14 GB/s for it where
the loop that Inductor generates reached 17-23 of about 31 GB/s (fp32, two AVX-512 cores, 576 x 576 to
49152 x 576). For more than one row the BLAS stays: it is decided while tracing, by the row count.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from kvcompile.passes.table import disabled, graph_pass

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K] -> [..., N]; sums in fp32."""
    rows = x.shape[:-1]
    if any(not isinstance(size, int) or size != 1 for size in rows) or not x.dtype.is_floating_point:
        return F.linear(x, weight, bias)
    out = (x.reshape(1, -1).float() * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).reshape(*rows, weight.shape[0])


_LIB.impl("linear", _linear, "CompositeImplicitAutograd")


NAME = "cpu_gemv"


def with_gemv(module: GraphModule) -> GraphModule:
    """A copy of a region whose linear layers choose their form when they are traced.

    KVCOMPILE_DISABLE=cpu_gemv leaves it out, to bisect.
    """
    return module if disabled(NAME) else give_gemv(copy.deepcopy(module))


@graph_pass("cpu_gemv")
def give_gemv(module: GraphModule) -> GraphModule:
    """The same in place."""
    if disabled(NAME):
        return module
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            node.target = torch.ops.kvcompile.linear.default
    module.recompile()
    return module
