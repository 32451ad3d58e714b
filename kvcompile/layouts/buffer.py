"""One tensor of a layer's cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BufferSpec:
    """One cache tensor of a layer without its leading dim: [num_kv_heads, rows, ...], a row per slot or as
    `Part.rows` says. The leading dim is the batch, or the pages of a pool where `paged`."""

    name: str  # "keys.data", "keys.scale", "values.data", ...
    shape: tuple[int, ...]
    dtype: torch.dtype
    paged: bool = False
    fixed: bool = False  # its rows are not those of slots, and as many whatever the tokens
    fill: tuple[float, ...] | None = None  # what a calibrated part holds from the start, a number per head

    def written(self, buffer: torch.Tensor) -> torch.Tensor:
        """`buffer` [batch, *shape] with what it holds from the start, in place; as it is where that is nothing."""
        if self.fill is not None:
            values = torch.tensor(self.fill, dtype=self.dtype, device=buffer.device)
            buffer.copy_(values.view(1, -1, *[1] * (buffer.dim() - 2)).expand_as(buffer))
        return buffer
