"""Rounds to integers, to nearest even; what is beyond their range becomes its end."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.shared.dialect import current


def signed(x: Tensor, largest: float) -> Tensor:
    """x fp32 -> int8."""
    return torch.round(x).clamp(-largest, largest).to(torch.int8)


def unsigned(x: Tensor, largest: float) -> Tensor:
    """x fp32 -> codes from 0, as `unpack` gives them."""
    q = torch.round(x).clamp(0.0, largest)
    return q if current().portable else q.to(torch.uint8)
