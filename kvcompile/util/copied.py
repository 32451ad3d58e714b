"""Copies of tensors that share memory among each other as the originals do, and none with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each tensor, in memory of its own; one that lies in another of them, lies in that one's copy.

    A view of a large tensor, or of a file that is mapped, keeps all of it; its copy does not.
    """
    made: dict[str, Tensor] = {}
    whole: dict[
        int, list[tuple[Tensor, Tensor]]
    ] = {}  # by storage, what lies contiguously in it, and its copy
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        known = whole.setdefault(tensor.untyped_storage().data_ptr(), [])
        inside = next((pair for pair in known if tensor.is_contiguous() and _lies_in(tensor, pair[0])), None)
        if inside is not None:
            original, copy = inside
            offset = copy.storage_offset() + tensor.storage_offset() - original.storage_offset()
            made[name] = torch.as_strided(copy, tensor.shape, tensor.stride(), offset)
            continue
        made[name] = tensor.clone()  # of a view with gaps, without them
        if tensor.is_contiguous():
            known.append((tensor, made[name]))
    return {name: made[name] for name in tensors}


def _lies_in(tensor: Tensor, other: Tensor) -> bool:
    if tensor.dtype != other.dtype or not tensor.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() - other.storage_offset()
    return start >= 0 and start + last < other.numel()
