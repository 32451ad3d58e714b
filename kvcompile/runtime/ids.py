"""What token ids must be like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import InputError


def check_ids(input_ids: Any) -> None:
    """Refuse what is no int64 tensor [batch, new tokens] with something in it.

    Raises:
        InputError: another type, shape or dtype.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or 0 in input_ids.shape:
        got = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise InputError(f"input_ids: expected an int64 tensor [batch, new tokens], got {got}")
    if input_ids.dtype != torch.int64:
        raise InputError(
            f"input_ids: expected dtype torch.int64, got {input_ids.dtype}; pass input_ids.long()"
        )
