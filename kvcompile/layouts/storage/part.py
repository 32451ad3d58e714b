"""Parts: the tensors of a layer's cache that a storage is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """One tensor of a storage: [batch, kv_head, rows, *shape].

    every: tokens that share a row; a layout of `slots` slots has ceil(slots / every) rows
    fixed: rows, however many slots there are; 0: as `every` says. Such parts stand behind the others
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    every: int = 1
    fixed: int = 0

    def rows(self, slots: int) -> int:
        return self.fixed or -(-slots // self.every)


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether it is a float of one byte: what torch neither gathers nor joins, and old GPUs cannot convert."""
    return dtype.is_floating_point and dtype.itemsize == 1
