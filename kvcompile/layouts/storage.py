"""Storage: how one K or V vector of `dim` channels is encoded in its slot.

| storage | stored per vector | source |
|---|---|---|
| ModelDtype | dim elements of the model's dtype | - |
| Int8 | dim int8 + one scale, x ~ q * scale, scale = absmax / 127 | LMDeploy, vLLM int8 per token-head |
| Int4 | dim/2 bytes + scale, minimum per group, x ~ q * scale + minimum, scale = (max - min) / 15 | LMDeploy |
| InKeys | nothing: values that are the first channels of the keys | DeepSeek-V2 |

A storage is data; `kernels/reference.py` encodes and decodes by it. To add one, see CONTRIBUTING.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch

from kvcompile.layouts import symbols as sy

ScaleDtype = Literal["float16", "float32"]
_SCALE_BYTES = {"float16": 2, "float32": 4}


@dataclass(frozen=True)
class Part:
    """One tensor of a storage: `shape` are the dims after [batch, kv_head, slot]."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ModelDtype:
    """Vectors as the model computes them."""

    kind: Literal["model"] = "model"

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("data", (dim,), model_dtype),)

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return dim * sy.P

    def check(self, dim: int) -> str | None:
        return None

    def __str__(self) -> str:
        return "model"


@dataclass(frozen=True)
class Int8:
    """Symmetric int8, one scale per token and head; round to nearest even, zero rows get scale 0."""

    kind: Literal["int8"] = "int8"
    scale_dtype: ScaleDtype = "float16"

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        return (
            Part("data", (dim,), torch.int8),
            Part("scale", (), getattr(torch, self.scale_dtype)),
        )

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return dim + _SCALE_BYTES[self.scale_dtype]

    def check(self, dim: int) -> str | None:
        return None

    def __str__(self) -> str:
        return "int8"


@dataclass(frozen=True)
class Int4:
    """Asymmetric int4, two channels a byte; scale and minimum per group of channels (0: the whole head).

    Byte c holds channel c in its low and channel c + dim/2 in its high nibble.
    """

    kind: Literal["int4"] = "int4"
    group: int = 0
    scale_dtype: ScaleDtype = "float16"

    def groups(self, dim: int) -> int:
        return 1 if self.group == 0 else dim // self.group

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        scale_dtype = getattr(torch, self.scale_dtype)
        return (
            Part("data", (dim // 2,), torch.uint8),
            Part("scale", (self.groups(dim),), scale_dtype),
            Part("minimum", (self.groups(dim),), scale_dtype),
        )

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        groups = sympy.Integer(1) if self.group == 0 else dim / self.group
        return dim / 2 + groups * 2 * _SCALE_BYTES[self.scale_dtype]

    def check(self, dim: int) -> str | None:
        if dim % 2:
            return f"int4 packs two channels a byte: head_dim must be even, got {dim}"
        if self.group and dim % self.group:
            return f"int4 group {self.group} does not divide head_dim {dim}"
        return None

    def __str__(self) -> str:
        return f"int4/g{self.group}" if self.group else "int4"


@dataclass(frozen=True)
class InKeys:
    """For values only: they are the first `channels` channels of the keys as those are stored (MLA's latent)."""

    channels: int
    kind: Literal["in_keys"] = "in_keys"

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        return ()

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return sympy.Integer(0)

    def check(self, dim: int) -> str | None:
        return None

    def __str__(self) -> str:
        return "in the keys"


Storage = ModelDtype | Int8 | Int4 | InKeys
STORAGES: tuple[type[Storage], ...] = (ModelDtype, Int8, Int4, InKeys)


def storage_from(data: dict[str, Any]) -> Storage:
    """Rebuild a storage from `dataclasses.asdict`."""
    return next(cls for cls in STORAGES if cls.kind == data["kind"])(**data)
