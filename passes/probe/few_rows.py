"""A product of few rows with a large weight, computed the other way round: W x^T, in place of x W^T.

Runs that verify a model feed it a token at a time. BLAS shares the work of a product out by the columns of what it is
given as the result: a few of them, in one order, and thousands, in the other, so that it reads the weight with all
threads. One row is a matrix by a vector, which BLAS reads with a single thread, so it comes twice. On two cores, MKL
takes 46, 75 and 70 ms for one, two and five rows by all weights of SmolLM2-135M as `linear` gives them to it, and 20,
20 and 40 ms so; on one core 50, 88 and 84, and 40, 35 and 65. From seven rows on one way is as good as the other.

The same numbers are multiplied and summed, in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LINEAR = torch.ops.aten.linear.default
_FEW = 6
_LARGE = 1 << 15  # numbers of a weight that is not in a cache anyway


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K], weight [N, K], bias [N] -> [.., N], contiguous, as `aten.linear` gives it."""
    if not _is_slow(x, weight):
        return LINEAR(x, weight, bias)  # type: ignore[no-any-return]
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count == 1:
        rows = rows.repeat(2, 1)
    found = torch.mm(weight, rows.t())[:, :count].t().contiguous().view(*x.shape[:-1], len(weight))
    return found if bias is None else found + bias


def _is_slow(x: Tensor, weight: Tensor) -> bool:
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2
    same = x.dtype is weight.dtype is torch.float32 and x.device.type == weight.device.type == "cpu"
    return plain and same and 0 < x.numel() <= _FEW * x.shape[-1] and weight.numel() >= _LARGE
