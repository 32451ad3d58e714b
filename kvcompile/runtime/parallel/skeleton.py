"""A model without its weights: its classes, its configuration, its `generate`; every parameter on the meta device.

An optimized module of one rank has its own part of the weights, and the original's must go once nobody else holds them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from kvcompile.errors import ModelError


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters and buffers have shapes and no values; the model is as it was.

    Raises:
        ModelError: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # models hold anything
        raise ModelError(
            f"{type(model).__name__} cannot be copied without its weights, which a rank must not keep whole: "
            f"{type(error).__name__}: {error}"
        ) from error
