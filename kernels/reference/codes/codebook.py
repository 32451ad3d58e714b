"""Encodes by codebooks: a number becomes the code of the nearest of a few levels (`Code.levels`).

The code is the number of thresholds between levels that lie below; of a signed codebook, of the magnitude, with the
sign in the highest bit. So there is no search, and every target has the words for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.shared.dialect import current
from kvcompile.layouts.storage import Code


def nearest(code: Code, x: Tensor) -> Tensor:
    """x fp32 -> codes, as `unpack` gives them; what is no number has any code."""
    size = x.abs() if code.signed else x
    dtype = torch.float32 if current().portable else torch.uint8
    found = torch.zeros_like(x, dtype=dtype)
    for threshold, upper in code.thresholds:
        found = found + (size >= threshold if upper else size > threshold).to(dtype)
    return found + (x < 0).to(dtype) * len(code.levels) if code.signed else found


def numbers(code: Code, codes: Tensor) -> Tensor:
    """Codes as `unpack` gives them -> the numbers of their levels, fp32."""
    table = torch.tensor(code.numbers, device=codes.device)
    return F.embedding(codes.to(torch.int64), table[:, None]).squeeze(-1)
