"""A generated kernel: its text and its arguments, by name, in the order of its signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvcompile.kernels.triton.device import Fp8Form
from kvcompile.layouts.storage import is_fp8

ScalarType = Literal["i32", "i64", "fp32"]
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class TensorParam:
    """A tensor of `rank` dimensions: `name_ptr`, and `name_s0` .. the strides of all but the last, in elements.

    rank 0: any number of dimensions, dense; its sizes are in the text or come as scalars
    """

    name: str
    dtype: torch.dtype
    rank: int = 0

    @property
    def strides(self) -> int:
        return max(self.rank - 1, 0)

    @property
    def names(self) -> tuple[str, ...]:
        return (f"{self.name}_ptr", *(f"{self.name}_s{dim}" for dim in range(self.strides)))

    @property
    def types(self) -> tuple[str, ...]:
        """Types of `names` as `triton.compile` takes them; strides may exceed 32 bits only times an index."""
        return (_POINTERS[self.dtype], *["i32"] * self.strides)


@dataclass(frozen=True)
class ScalarParam:
    """A number that is known at run time: a size."""

    name: str
    type: ScalarType = "i32"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def types(self) -> tuple[str, ...]:
        return (self.type,)


Param = TensorParam | ScalarParam


def taken_as(dtype: torch.dtype, fp8: Fp8Form) -> torch.dtype:
    """As what kernels take a part of `dtype`: fp8 as bytes, where they convert it as bits."""
    return torch.uint8 if is_fp8(dtype) and fp8 == "bits" else dtype


@dataclass(frozen=True)
class KernelSource:
    """What a role's generator returns.

    name:   of the @triton.jit function in `text`
    params: its arguments in order; block sizes and all that the spec says stand in the text as constants
    text:   the module's source, without the header that the cache adds
    """

    name: str
    params: tuple[Param, ...]
    text: str

    @property
    def signature(self) -> dict[str, str]:
        """Argument -> type, for ahead-of-time compilation."""
        return {
            name: kind for param in self.params for name, kind in zip(param.names, param.types, strict=True)
        }
