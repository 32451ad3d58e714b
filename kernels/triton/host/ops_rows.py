"""Defines the op of the role decoded_rows: slots that hold codes, to rows of numbers.

It is a `torch.library.triton_op`: Inductor and AOTInductor see the launch, and plan the memory of the rows. In Triton's
interpreter it runs on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.triton import packed
from kvcompile.kernels.triton.attend import decoded_rows as role
from kvcompile.kernels.triton.host.launch import launch
from kvcompile.kernels.triton.host.ops_arguments import parts_of, slots_of
from kvcompile.kernels.triton.host.source import kernel_of


@torch.library.triton_op("kvcompile::triton_decoded_rows", mutates_args={})
def decoded_rows(
    buffers: list[Tensor],
    positions: Tensor,
    decoded: int,
    spec: str,
    page_table: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> list[Tensor]:
    """What is read of the slots of tokens before a prompt's, or of all; see `attend/decoded_rows.py`.

    Args:
        buffers: the site's, K's parts, then V's, dense.
        positions: int64 [B, S], of which the first says how many tokens are held before the prompt's S.
        decoded: rows; 0: none is written.
        page_table: int32 [B, pages], of a layout in pages.
        query_start_loc: int64 [B + 1], with option packed; positions are one row then, [1, S].

    Returns:
        [B, Hkv, max(1, decoded), D] and [B, Hkv, max(1, decoded), Dv], of which those of no token are anything.
    """
    kernel = kernel_of(spec)
    own = kernel.spec
    count = torch.sym_max(1, decoded)
    batch, heads = positions.shape[0], own.num_kv_heads
    if query_start_loc is not None:
        batch = query_start_loc.shape[0] - 1
    outs = [
        positions.new_empty((batch, heads, count, dim), dtype=own.torch_dtype)
        for dim in (own.head_dim, own.v_head_dim)
    ]
    read = {param.name for param in kernel.source.params}  # not what stands in full beside the slots
    given: dict[str, Any] = {name: x for name, x in parts_of(kernel, buffers).items() if name in read}
    given["positions"] = positions
    if page_table is not None:
        given["page_table"] = page_table
    given |= zip(("decoded_k", "decoded_v"), outs, strict=True)
    sizes = {"decoded": decoded}
    if "slots" in read:
        sizes["slots"] = slots_of(own, buffers)
    if query_start_loc is not None:
        given = packed.launched(given, batch) | {"query_start_loc": query_start_loc}
    elif role.ALL in own.options:
        sizes["tokens"] = positions.shape[1]
    launch(kernel, role.grid(own, count, batch), given, sizes, num_warps=role.WARPS)
    return outs
