"""Models whose weights were made under `torch.inference_mode()`: PyTorch traces no such tensors, so others that share
their memory stand in for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def as_normal(model: Any) -> Iterator[None]:
    """Meanwhile the weights of `model` are normal tensors, of the same memory; afterwards it has its own again."""
    if not isinstance(model, nn.Module):  # which is told by whoever looks at it
        yield
        return
    made: dict[int, Tensor] = {}
    swapped: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for home in homes:
                for name, tensor in home.items():
                    if isinstance(tensor, Tensor) and tensor.is_inference():
                        swapped.append((home, name, tensor))
        for home, name, tensor in swapped:
            if id(tensor) not in made:  # tied weights stay tied
                made[id(tensor)] = _twin(tensor)
            home[name] = made[id(tensor)]
        yield
    finally:
        for home, name, tensor in swapped:
            home[name] = tensor


def _twin(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):
        twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        twin.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return nn.Parameter(twin, requires_grad=False) if isinstance(tensor, nn.Parameter) else twin
