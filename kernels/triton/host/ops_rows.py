"""Defines the op of the role decoded_rows: slots that hold codes, to rows of numbers.

It is a `torch.library.triton_op`: Inductor and AOTInductor see the launch, and plan the memory of the rows. In Triton's
interpreter it runs on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.triton.attend import decoded_rows as role
from kvcompile.kernels.triton.host.launch import launch
from kvcompile.kernels.triton.host.ops_attend import parts_of, slots_of
from kvcompile.kernels.triton.host.source import kernel_of


@torch.library.triton_op("kvcompile::triton_decoded_rows", mutates_args={})
def decoded_rows(
    buffers: list[Tensor], positions: Tensor, like: Tensor, decoded: int, spec: str
) -> list[Tensor]:
    """What is read of the slots of tokens before a prompt's, or of all; see `attend/decoded_rows.py`.

    Args:
        buffers: the site's, K's parts, then V's, dense.
        positions: int64 [B, S], of which the first says how many tokens are held before the prompt's S.
        like: any tensor in the model's dtype, [B, ..].
        decoded: rows; 0: none is written.

    Returns:
        [B, Hkv, max(1, decoded), D] and [B, Hkv, max(1, decoded), Dv], of which those of no token are anything.
    """
    kernel = kernel_of(spec)
    own = kernel.spec
    count = torch.sym_max(1, decoded)
    batch, heads = like.shape[0], own.num_kv_heads
    outs = [
        like.new_empty((batch, heads, count, dim), dtype=own.torch_dtype)
        for dim in (own.head_dim, own.v_head_dim)
    ]
    read = {param.name for param in kernel.source.params}  # not what stands in full beside the slots
    given: dict[str, Any] = {name: x for name, x in parts_of(kernel, buffers).items() if name in read}
    given["positions"] = positions
    given |= zip(("decoded_k", "decoded_v"), outs, strict=True)
    sizes = {"slots": slots_of(own, buffers), "decoded": decoded}
    if role.ALL in own.options:
        sizes["tokens"] = positions.shape[1]
    launch(kernel, role.grid(own, count, batch), given, sizes, num_warps=role.WARPS)
    return outs
