"""The Hadamard rotation of `layouts/storage/hadamard.py`: y = H x / sqrt(n), by blocks of n channels."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.layouts.storage.hadamard import block


def hadamard(x: Tensor) -> Tensor:
    """x [..., dim] -> fp32 [..., dim]; its own inverse.

    Butterflies, from neighbours to halves: sums in one order, however many vectors there are, so that a vector is
    rounded alike in a prompt and in a decode step.
    """
    size = block(x.shape[-1])
    y: Tensor = x.float()
    step = 1
    while step < size:
        a, b = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    turned: Tensor = y * size**-0.5
    return turned
