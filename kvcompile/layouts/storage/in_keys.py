"""InKeys: values that are kept in the keys (MLA's latent)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import sympy
import torch

from kvcompile.layouts.storage.part import Part


@dataclass(frozen=True)
class InKeys:
    """For values only: they are the first `channels` channels of the keys as those are stored."""

    channels: int

    residual: ClassVar[int] = 0
    sinks: ClassVar[int] = 0
    calibration: ClassVar[None] = None
    channelwise: ClassVar[bool] = False
    hadamard: ClassVar[bool] = False

    @property
    def without_hadamard(self) -> InKeys:
        return self

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        return ()

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return sympy.Integer(0)

    def bytes(self, dim: sympy.Expr, slots: sympy.Expr) -> sympy.Expr:
        return sympy.Integer(0)

    def check(self, dim: int) -> str | None:
        return None

    def exact(self, model_dtype: torch.dtype) -> bool:
        return True

    def __str__(self) -> str:
        return "in the keys"
