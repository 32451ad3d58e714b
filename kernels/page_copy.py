"""Pages of a pool onto others: what sequences that part need (beam search), by PyTorch or by a generated kernel.

pool [pages, Hkv, rows_per_page, ...]; sources, targets int64 [N]: page targets[n] becomes what page sources[n] is.
No page is in both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from kvcompile.kernels.spec import Kernels

PageCopy = Callable[[Tensor, Tensor, Tensor], None]


def page_copy(kernels: Kernels) -> PageCopy:
    """The function (pool, sources, targets) that copies, in place."""
    return _generated if kernels == "triton" else _reference


def _reference(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    flat = _bytes(pool)
    flat[targets] = flat[sources]


def _generated(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    importlib.import_module("kvcompile.kernels.triton.ops")  # registers it
    torch.ops.kvcompile.triton_page_copy(_bytes(pool), sources, targets)


def _bytes(pool: Tensor) -> Tensor:
    """The pool as something that can be gathered: torch gathers no fp8."""
    return pool.view(torch.uint8) if pool.is_floating_point() and pool.itemsize == 1 else pool
