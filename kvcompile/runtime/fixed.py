"""What modules do and an optimized one cannot: move, train, be copied."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from kvcompile.errors import KVCompileError


class Fixed(nn.Module):
    """A module that stays where it is and as it is, and is for inference."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it stays."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """In what it stays."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        probe = torch.zeros(1, dtype=self.dtype, device=self.device)
        moved = fn(probe)
        if moved.dtype != probe.dtype or moved.device != probe.device:
            raise KVCompileError(
                f"this module was optimized for {probe.dtype} on {probe.device}, and its cache and compiled "
                f"code stay there; move the original model to {moved.dtype} on {moved.device} and call "
                "kvcompile.optimize again"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise KVCompileError(
            f"{type(self).__name__} cannot be pickled, copied or saved by torch.save: it has code and a cache. "
            "fast.save(folder) writes it, kvcompile.load(folder) brings it back; fast.handle.save(path) writes a text "
            "and its cache, kvcompile.export(fast, ..) an artifact"
        )

    def _replicate_for_data_parallel(self) -> Any:
        raise KVCompileError(
            "nn.DataParallel: its replicas would write into one cache. Use parallel= (docs/parallel.md), or optimize a "
            "model on each device"
        )

    def train(self, mode: bool = True) -> Self:
        """Only evaluation: a model with a cache has no gradients."""
        if mode:
            raise KVCompileError("an optimized module is for inference: train the original, then optimize it")
        self.training = False
        return self
