"""Encodes floats: what a dtype cannot hold becomes the largest number that it can."""

from __future__ import annotations

import torch
from torch import Tensor


def clamped(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, at most its largest finite number."""
    largest = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= largest:
        return x.to(dtype)
    # bfloat16 has no 65504: there the bound itself would be rounded up, to what float16 cannot hold.
    return x.to(torch.promote_types(x.dtype, torch.float32)).clamp(-largest, largest).to(dtype)
