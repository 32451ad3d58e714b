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
    if isinstance(input_ids, Tensor) and input_ids.is_nested:  # which has no shape
        raise InputError("input_ids: expected an int64 tensor [batch, new tokens], got a nested one")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or 0 in input_ids.shape:
        got = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise InputError(f"input_ids: expected an int64 tensor [batch, new tokens], got {got}")
    if input_ids.layout != torch.strided:
        raise InputError(
            f"input_ids: expected a dense tensor, got {input_ids.layout}; pass input_ids.to_dense()"
        )
    if input_ids.dtype != torch.int64:
        raise InputError(
            f"input_ids: expected dtype torch.int64, got {input_ids.dtype}; pass input_ids.long()"
        )


def reads_at_once(device: torch.device) -> bool:
    """Whether values of a device are read without waiting for what was launched before."""
    return device.type == "cpu"


def check_vocabulary(input_ids: Tensor, bounds: tuple[int, int] | None, what: str = "input_ids") -> None:
    """Refuse ids that the model does not have.

    bounds: the least and the largest id; None: they are not known

    Raises:
        InputError: an id outside.
    """
    if bounds is None:
        return
    if input_ids.is_meta:
        raise InputError(f"{what}: expected a tensor with numbers, got one without (meta)")
    least, most = int(input_ids.min()), int(input_ids.max())
    if least < bounds[0] or most > bounds[1]:
        raise InputError(
            f"{what}: expected ids from {bounds[0]} to {bounds[1]}, got {least if least < bounds[0] else most}"
        )
