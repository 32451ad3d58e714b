"""Short names for the storages of the literature."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvcompile.layouts.storage.scale import Scale, ScaleDtype
from kvcompile.layouts.storage.storage import Storage


def model_dtype() -> Storage:
    """Vectors as the model computes them."""
    return Storage("model")


def float_dtype(dtype: Literal["float32", "float16", "bfloat16"]) -> Storage:
    """Vectors in a dtype that may differ from the model's."""
    return Storage(dtype)


def fp8(
    form: Literal["e4m3", "e5m2"] = "e4m3",
    scale: Literal["token", "tensor", "head", "none"] = "token",
    scale_dtype: ScaleDtype = "float16",
) -> Storage:
    """fp8 with one scale per token and head, a calibrated one (always float32), or none."""
    match scale:
        case "token":
            return Storage(form, Scale("vector", dtype=scale_dtype))
        case "none":
            return Storage(form)
        case _:
            return Storage(form, Scale(scale, dtype="float32"))


def int8(scale_dtype: ScaleDtype = "float16") -> Storage:
    """Symmetric int8, one scale per token and head."""
    return Storage("int8", Scale("vector", dtype=scale_dtype))


def uint(bits: Literal[2, 3, 4, 8], group: int = 0, scale_dtype: ScaleDtype = "float16") -> Storage:
    """Unsigned integers with a scale and a minimum per group of channels (0: the whole head)."""
    return Storage(f"uint{bits}", Scale("group", group, scale_dtype, minimum=True))


def per_channel(
    bits: Literal[2, 3, 4, 8],
    group: int,
    residual: int,
    scale_dtype: ScaleDtype = "float16",
    sinks: int = 0,
) -> Storage:
    """KIVI's keys: unsigned integers with a scale and a minimum per channel and `group` consecutive tokens."""
    return Storage(f"uint{bits}", Scale("channel", group, scale_dtype, minimum=True), residual, sinks)


def nf4(group: int = 0, scale_dtype: ScaleDtype = "float16") -> Storage:
    """NF4 with a scale per group of channels (0: the whole head)."""
    return Storage("nf4", Scale("group", group, scale_dtype))


def mxfp4() -> Storage:
    """E2M1 with a power of two for each 32 channels."""
    return Storage("e2m1", Scale("group", 32, "e8m0"))


def with_residual(storage: Storage, residual: int, sinks: int = 0) -> Storage:
    """`storage` for all but the last `residual` tokens and the first `sinks`, which stay in the model's dtype."""
    return replace(storage, residual=residual, sinks=sinks)


def with_hadamard(storage: Storage) -> Storage:
    """`storage` of vectors that were transformed first."""
    return replace(storage, hadamard=True)
