"""Which weights a model has, as a short hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def of_weights(model: nn.Module) -> str:
    """Of the weights alone, every byte: whose checkpoint it is, wherever it was loaded from."""
    hashed, saved = hashlib.sha256(), model.state_dict().keys()
    buffers = [(name, tensor) for name, tensor in model.named_buffers() if name in saved]
    for name, tensor in sorted((*model.named_parameters(), *buffers), key=lambda pair: pair[0]):
        _add(hashed, name, tensor.detach())
    return hashed.hexdigest()[:16]


def _add(hashed: Any, name: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "__tensor_flatten__"):  # quantized weights are several tensors in one
        for part in tensor.__tensor_flatten__()[0]:
            _add(hashed, f"{name}.{part}", getattr(tensor, part))
        return
    hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    hashed.update(tensor.to("cpu").contiguous().flatten().view(torch.uint8).numpy().data)


def of_model(model: nn.Module) -> str:
    """Of the weights, every byte, and of the config: about a second for each GB."""
    # Of a saved module, which has no other buffers.
    saved: tuple[str, str] | None = getattr(model, "saved_as", None)
    if saved is not None and of_weights(model) == saved[0]:
        return saved[1]
    hashed = hashlib.sha256(_config(model).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _add(hashed, name, tensor.detach())
    return hashed.hexdigest()[:16]


def of_config(model: nn.Module) -> str:
    """Of the config alone; of a model without one, of its modules."""
    return hashlib.sha256(_config(model).encode()).hexdigest()[:16]


def of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Of tensors by name, every byte, in whatever order they come; nothing else of a model is read for it."""
    each = []
    for name, tensor in named:
        hashed = hashlib.sha256()
        _add(hashed, name, tensor.detach())
        each.append(hashed.hexdigest())
    return hashlib.sha256(" ".join(sorted(each)).encode()).hexdigest()[:16]


def _config(model: nn.Module) -> str:
    config: Any = getattr(model, "config", None)
    described: str = config.to_json_string() if hasattr(config, "to_json_string") else repr(model)
    return described
