"""A Hadamard rotation before quantization: channels that stand out are spread over their block (QuaRot, 2024).

    y = H x / sqrt(n)      H of entries +-1, symmetric, H H = n I

Blocks of n channels, the largest power of two that divides head_dim. Scores do not change if queries turn as keys
do; what the probabilities weigh is turned back once per query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy
import torch

from kvcompile.layouts.storages.floats import Float, Fp8, ModelDtype
from kvcompile.layouts.storages.integers import Affine, Int8
from kvcompile.layouts.storages.part import Calibration, Part
from kvcompile.layouts.storages.residual import PerChannel, Recent

Turned = ModelDtype | Float | Fp8 | Int8 | Affine | Recent | PerChannel
_SMALLEST = 4


@dataclass(frozen=True)
class Rotated:
    """`inner` of turned vectors."""

    inner: Turned
    kind: Literal["rotated"] = "rotated"

    @property
    def calibration(self) -> Calibration | None:
        return self.inner.calibration

    @property
    def residual(self) -> int:
        """Newest tokens that are kept beside, turned, in the model's dtype."""
        return self.inner.residual

    @property
    def sinks(self) -> int:
        """First tokens of a sequence that are kept beside, turned, in the model's dtype."""
        return self.inner.sinks

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        return self.inner.parts(dim, model_dtype)

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return self.inner.bytes_per_vector(dim)

    def bytes(self, dim: sympy.Expr, slots: sympy.Expr) -> sympy.Expr:
        """Bytes of `slots` slots of one KV head."""
        return self.inner.bytes(dim, slots)

    def check(self, dim: int) -> str | None:
        if block(dim) < _SMALLEST:
            return (
                f"rotate: hadamard turns blocks of a power of two that divides head_dim; {dim} has none of {_SMALLEST} "
                "or more: use rotate: none"
            )
        return self.inner.check(dim)

    def exact(self, model_dtype: torch.dtype) -> bool:
        return False

    def __str__(self) -> str:
        return f"hadamard {self.inner}"


def block(dim: int) -> int:
    """Channels that turn together: the largest power of two that divides `dim`."""
    return dim & -dim
