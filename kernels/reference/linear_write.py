"""`kvcompile::linear_write`: new rows of each sequence go to consecutive rows of its buffer.

    out[b, h, start[b] + s] = rows[b, h, s],  and all else of `out` is that of `buffer`

ONNX has it as TensorScatter (opset 24, axis -2, linear), TensorRT as KVCacheUpdate, which writes in place where input
and output are bound to one address. It is an op of its own so that a translation finds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define(
    "linear_write(Tensor buffer, Tensor rows, Tensor start) -> Tensor", tags=(torch.Tag.flexible_layout,)
)


def _linear_write(buffer: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """buffer [B, H, T, D], rows [B, H, S, D], start int64 [B] with start + S <= T -> [B, H, T, D]."""
    place = start[:, None] + torch.arange(rows.shape[2], device=rows.device)
    index = place[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
    return buffer.scatter(2, index, rows)


def _fake(buffer: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(buffer)


_LIB.impl("linear_write", _linear_write, "CompositeExplicitAutograd")
torch.library.register_fake("kvcompile::linear_write", _fake, lib=_LIB)
OP = torch.ops.kvcompile.linear_write.default


def fits(buffer: Tensor) -> bool:
    """Whether TensorRT can update `buffer` this way: [B, H, T, D] in fp32, fp16 or bf16."""
    return buffer.dim() == 4 and buffer.dtype in (torch.float32, torch.float16, torch.bfloat16)


def write(buffer: Tensor, rows: Tensor, positions: Tensor) -> None:
    """Rows [B, H, S, D] of tokens at `positions` int64 [B, S] go to their places in `buffer` [B, H, T, D].

    Padding stands on the left (negative positions), and only where a sequence has seen no token yet. Its rows are
    turned to the end of the new ones, behind the sequence: what no query sees, and the next tokens overwrite. They are
    within the buffer, because the limit of tokens counts padding, too.
    """
    count = rows.shape[2]
    padding = (-positions[:, :1]).clamp(min=0)
    turned = torch.arange(count, device=rows.device) + padding
    turned = torch.where(turned < count, turned, turned - count)
    index = turned[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
    buffer.copy_(OP(buffer, rows.gather(2, index), positions[:, 0].clamp(min=0)))
