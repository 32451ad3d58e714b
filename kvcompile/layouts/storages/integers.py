"""Integer storages, every vector by itself.

| storage | stored per vector | source |
|---|---|---|
| Int8 | dim int8 + one scale, x ~ q * scale | LMDeploy, vLLM int8 per token-head |
| Affine | dim * bits / 8 bytes + scale, minimum per group, x ~ q * scale + minimum | LMDeploy, KIVI (values) |

Int8: scale = absmax / 127. Affine: scale = (max - min) / (2^bits - 1), q from 0.

Bits are packed without gaps; `kernels/bits.py` says where each channel's are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy
import torch

from kvcompile.layouts.storages.part import SCALE_BYTES, Part, PerToken, ScaleDtype, scale_dtype

Bits = Literal[2, 3, 4, 8]
# Channels that share whole bytes: 3 bits are a plane of 2 and a plane of 1, of which a byte holds 4 and 8.
_TOGETHER: dict[Bits, int] = {2: 4, 3: 8, 4: 2, 8: 1}


@dataclass(frozen=True)
class Int8(PerToken):
    """Symmetric int8, one scale per token and head; round to nearest even, zero rows get scale 0."""

    kind: Literal["int8"] = "int8"
    scale_dtype: ScaleDtype = "float16"

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("data", (dim,), torch.int8), Part("scale", (), scale_dtype(self.scale_dtype)))

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return dim + SCALE_BYTES[self.scale_dtype]

    def __str__(self) -> str:
        return "int8"


@dataclass(frozen=True)
class Affine(PerToken):
    """Unsigned integers with a scale and a minimum per group of channels (0: the whole head)."""

    bits: Bits
    group: int = 0
    scale_dtype: ScaleDtype = "float16"
    kind: Literal["affine"] = "affine"

    def groups(self, dim: int) -> int:
        return 1 if self.group == 0 else dim // self.group

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        dtype = scale_dtype(self.scale_dtype)
        return (
            Part("data", (dim * self.bits // 8,), torch.uint8),
            Part("scale", (self.groups(dim),), dtype),
            Part("minimum", (self.groups(dim),), dtype),
        )

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        groups = sympy.Integer(1) if self.group == 0 else dim / self.group
        return dim * self.bits / 8 + groups * 2 * SCALE_BYTES[self.scale_dtype]

    def check(self, dim: int) -> str | None:
        problem = check_packing(self.bits, dim)
        if problem is None and self.group and dim % self.group:
            return f"int{self.bits} group {self.group} does not divide head_dim {dim}"
        return problem

    def __str__(self) -> str:
        name = f"int{self.bits}" + (" asymmetric" if self.bits == 8 else "")
        return f"{name}/g{self.group}" if self.group else name


def check_packing(bits: Bits, dim: int) -> str | None:
    """Why `dim` channels of `bits` do not fill whole bytes, or None."""
    together = _TOGETHER[bits]
    if dim % together == 0:
        return None
    return (
        f"int{bits} packs {together} channels together: head_dim must be a multiple of {together}, got {dim}"
    )
