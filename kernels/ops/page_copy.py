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
from kvcompile.layouts.storage import is_fp8

PageCopy = Callable[[Tensor, Tensor, Tensor], None]


def page_copy(kernels: Kernels) -> PageCopy:
    """The function (pool, sources, targets) that copies, in place."""
    return _generated if kernels == "triton" else _reference


def _reference(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    flat = indexable(pool)
    flat[targets] = flat[sources]


def indexable(pool: Tensor) -> Tensor:
    """The same memory in a dtype that torch can index: it gathers no fp8."""
    return pool.view(torch.uint8) if is_fp8(pool.dtype) else pool


def _generated(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    # Without a layer of generated kernels, nothing of theirs is imported.
    importlib.import_module("kvcompile.kernels.triton.host.pages").copy_pages(pool, sources, targets)
