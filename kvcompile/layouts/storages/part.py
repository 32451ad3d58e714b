"""What every storage is made of: parts (tensors of a layer's cache), and what most storages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import sympy
import torch

ScaleDtype = Literal["float16", "float32"]
SCALE_BYTES: dict[ScaleDtype, int] = {"float16": 2, "float32": 4}


@dataclass(frozen=True)
class Part:
    """One tensor of a storage: [batch, kv_head, rows, *shape].

    every: tokens that share a row; a layout of `slots` slots has ceil(slots / every) rows
    fixed: rows, however many slots there are; 0: as `every` says. Such parts stand behind the others
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    every: int = 1
    fixed: int = 0

    def rows(self, slots: int) -> int:
        return self.fixed or -(-slots // self.every)


# What one scale that is known beforehand is for.
Calibration = Literal["tensor", "head"]


class PerToken(ABC):
    """A storage that encodes every vector by itself, in one slot."""

    @property
    def calibration(self) -> Calibration | None:
        """What has a scale that was measured beforehand, which its part "scale" holds from the start."""
        return None

    @property
    def residual(self) -> int:
        """Newest tokens that are kept beside, in the model's dtype."""
        return 0

    @property
    def sinks(self) -> int:
        """First tokens of a sequence that are kept beside, in the model's dtype."""
        return 0

    @abstractmethod
    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        """Bytes that one more vector of `dim` channels takes."""

    def bytes(self, dim: sympy.Expr, slots: sympy.Expr) -> sympy.Expr:
        """Bytes of `slots` slots of one KV head."""
        return slots * self.bytes_per_vector(dim)

    def check(self, dim: int) -> str | None:
        """Why vectors of `dim` channels cannot be kept like this, or None."""
        return None

    def exact(self, model_dtype: torch.dtype) -> bool:
        """Whether vectors in `model_dtype` come back as they were."""
        return False


def scale_dtype(name: ScaleDtype) -> torch.dtype:
    return {"float16": torch.float16, "float32": torch.float32}[name]
