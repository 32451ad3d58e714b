"""What the roles that write a cache cannot do, with the reason; asked when a plan is made."""

from __future__ import annotations

import torch

from kvcompile.kernels.triton.encode.tile import power_of_two
from kvcompile.kernels.triton.write.parts import Side
from kvcompile.layouts import Affine, CacheLayout, InKeys

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def unsupported(layout: CacheLayout, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> str | None:
    """Why no kernel writes this layout of vectors in `dtype`, or None."""
    if dtype not in _DTYPES:
        return f"the generated kernels take models in float32, float16 or bfloat16, not in {dtype}"
    keys = Side("keys", layout.keys, head_dim)
    values = () if isinstance(layout.values, InKeys) else (Side("values", layout.values, v_head_dim),)
    for side in (keys, *values):
        storage = side.settled
        if isinstance(storage, Affine) and storage.group not in (0, power_of_two(storage.group or 1)):
            return (
                f"{side.name}: {storage} has groups of {storage.group} channels, and a kernel's blocks are powers of "
                f"two: use group {power_of_two(storage.group) // 2}, or 0 for the whole head"
            )
    return None
