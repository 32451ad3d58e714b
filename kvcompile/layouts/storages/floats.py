"""Floating-point storages: the model's dtype, another one, fp8.

| storage | stored per vector | source |
|---|---|---|
| ModelDtype | dim elements of the model's dtype | - |
| Float | dim elements of float32, float16 or bfloat16; float16 saturates | - |
| Fp8 | dim bytes + one scale, x ~ q * scale, scale = absmax / 448; without a scale, it saturates | vLLM |
| Fp8, calibrated | dim bytes; one scale per layer and side, or per KV head, known beforehand | vLLM, TensorRT-LLM |

A scale per tensor, or per head, has to be known before the first token: from the first chunk, the result would
depend on how a prompt is cut. So it is measured on a text (`kvcompile/calibrate.py`), and what lies beyond what that
text had saturates. It is a tensor of the cache, not a constant of the code: layers with other scales stay alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy
import torch

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storages.part import (
    SCALE_BYTES,
    Calibration,
    Part,
    PerToken,
    ScaleDtype,
    scale_dtype,
)

FloatName = Literal["float32", "float16", "bfloat16"]
_FLOATS: dict[FloatName, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
Fp8Format = Literal["e4m3", "e5m2"]
_FP8: dict[Fp8Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether it is a float of one byte: what torch neither gathers nor joins, and old GPUs cannot convert."""
    return dtype.is_floating_point and dtype.itemsize == 1


FP8_RANGE = 448.0  # what a scaled element is at most


@dataclass(frozen=True)
class ModelDtype(PerToken):
    """Vectors as the model computes them."""

    kind: Literal["model"] = "model"

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("data", (dim,), model_dtype),)

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return dim * sy.P

    def exact(self, model_dtype: torch.dtype) -> bool:
        return True

    def __str__(self) -> str:
        return "model"


@dataclass(frozen=True)
class Float(PerToken):
    """Vectors in a dtype that may differ from the model's; what float16 cannot hold becomes its largest number."""

    dtype: FloatName
    kind: Literal["float"] = "float"

    @property
    def torch_dtype(self) -> torch.dtype:
        return _FLOATS[self.dtype]

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("data", (dim,), self.torch_dtype),)

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return dim * self.torch_dtype.itemsize

    def exact(self, model_dtype: torch.dtype) -> bool:
        return self.torch_dtype in (model_dtype, torch.float32)

    def __str__(self) -> str:
        return self.dtype


@dataclass(frozen=True)
class Fp8(PerToken):
    """fp8, with one scale per token and head, a calibrated one, or none; round to nearest even, never infinite.

    A scaled vector reaches to 448, the largest e4m3. e5m2 could go to 57,344, but then a float16 scale of small
    vectors would have no bits left; its range below 448 is wide enough (2^-16).

    scale "tensor", "head": calibrated, in float32; `scale_dtype` has no meaning for them.
    """

    format: Fp8Format = "e4m3"
    scale: Literal["token", "tensor", "head", "none"] = "token"
    scale_dtype: ScaleDtype = "float16"
    kind: Literal["fp8"] = "fp8"

    @property
    def torch_dtype(self) -> torch.dtype:
        return _FP8[self.format]

    @property
    def largest(self) -> float:
        """What an element is at most, after the scale."""
        return FP8_RANGE if self.scale != "none" else torch.finfo(self.torch_dtype).max

    @property
    def calibration(self) -> Calibration | None:
        return self.scale if self.scale in ("tensor", "head") else None

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        data = Part("data", (dim,), self.torch_dtype)
        match self.scale:
            case "token":
                return (data, Part("scale", (), scale_dtype(self.scale_dtype)))
            case "tensor" | "head":
                return (data, Part("scale", (), torch.float32, fixed=1))
            case "none":
                return (data,)

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return dim + (SCALE_BYTES[self.scale_dtype] if self.scale == "token" else 0)

    def bytes(self, dim: sympy.Expr, slots: sympy.Expr) -> sympy.Expr:
        """Bytes of `slots` slots of one KV head, and of its calibrated scale."""
        return slots * self.bytes_per_vector(dim) + (torch.float32.itemsize if self.calibration else 0)

    def __str__(self) -> str:
        scales = {
            "token": "",
            "tensor": " calibrated",
            "head": " calibrated per head",
            "none": " without scale",
        }
        return f"fp8_{self.format}{scales[self.scale]}"
