"""A product of few rows with a large weight, computed the other way round where that is faster: W x^T for x W^T.

Runs that verify a model feed it a token at a time. BLAS shares the work of a product out by the columns of what it is
given as the result: a few of them, in one order, and thousands, in the other, so that it may read the weight with one
thread or with all. One row is a matrix by a vector, which some read with a single thread, so it comes twice. Which way
is faster depends on the processor: of MKL, all weights of SmolLM2-135M by one, two and five rows take

| on two cores | as `linear` gives them to it | the other way round |
|---|---|---|
| AMD EPYC | 46, 75, 70 ms | 20, 20, 40 ms |
| Intel Sapphire Rapids | 23, 24, 39 ms | 65, 57, 60 ms |

so it is measured, once in a process for a number of rows and of threads. From seven rows on one way is as good as the
other. The same numbers are multiplied and summed, in another order.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

LINEAR = torch.ops.aten.linear.default
_FEW = 6
_LARGE = 1 << 15  # numbers of a weight that is not in a cache anyway
_ROUNDS = 3  # of a measurement, by turns; the shortest counts, whatever else runs on a core
_turned: dict[tuple[int, int], bool] = {}  # by rows and threads: whether the other way round is faster


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K], weight [N, K], bias [N] -> [.., N], contiguous, as `aten.linear` gives it."""
    if not _is_slow(x, weight):
        return LINEAR(x, weight, bias)  # type: ignore[no-any-return]
    rows = x.reshape(-1, x.shape[-1])
    asked = len(rows), torch.get_num_threads()
    if asked not in _turned:
        _turned[asked] = _is_faster(rows, weight)
    if not _turned[asked]:
        return LINEAR(x, weight, bias)  # type: ignore[no-any-return]
    found = _around(rows, weight).view(*x.shape[:-1], len(weight))
    return found if bias is None else found + bias


def _around(rows: Tensor, weight: Tensor) -> Tensor:
    count = len(rows)
    if count == 1:
        rows = rows.repeat(2, 1)
    return torch.mm(weight, rows.t())[:, :count].t().contiguous()


def _is_faster(rows: Tensor, weight: Tensor) -> bool:
    least: dict[Any, float] = {_around: float("inf"), LINEAR: float("inf")}
    for _ in range(_ROUNDS):
        for product in least:
            began = time.perf_counter()
            product(rows, weight)
            least[product] = min(least[product], time.perf_counter() - began)
    return least[_around] < least[LINEAR]


def _is_slow(x: Tensor, weight: Tensor) -> bool:
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2
    same = x.dtype is weight.dtype is torch.float32 and x.device.type == weight.device.type == "cpu"
    return plain and same and 0 < x.numel() <= _FEW * x.shape[-1] and weight.numel() >= _LARGE
