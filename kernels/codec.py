"""Encoding and decoding of K and V vectors, by storage. Shapes: x [..., dim]; parts as `Storage.parts` has them.

int8: q = round(x / s), s = absmax / 127, kept in the scale's dtype (the rounded scale is what divides).
affine: q = round((x - m) / s), m = min, s = (max - min) / (2^bits - 1) per group of channels.
fp8: q = x / s rounded, s = absmax / 448, or 1, or what calibration has put into the part "scale" [batch, kv_head, 1].
A row of one value has s = 0 (or is all minimum): the divisor is then 1, and decoding gives the value back. What a
dtype cannot hold becomes the largest number that it can.

What keeps the newest tokens in full is in `kernels/recent.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompile.kernels.bits import pack, unpack
from kvcompile.kernels.dialect import current
from kvcompile.kernels.fp8_codes import from_code, to_code
from kvcompile.kernels.hadamard import hadamard
from kvcompile.layouts import (
    Affine,
    Float,
    Fp8,
    InKeys,
    Int8,
    ModelDtype,
    PerChannel,
    Recent,
    Rotated,
    Storage,
)
from kvcompile.layouts.storage import as_kept as as_kept
from kvcompile.layouts.storages.part import scale_dtype


def encode(storage: Storage, x: Tensor, parts: Sequence[Tensor] = ()) -> list[Tensor]:
    """x [..., dim] -> the storage's parts, each [..., *part.shape], without those that hold a calibrated scale.

    parts: the parts that x will be written to; needed only where a calibrated scale is among them, and then x is
        [batch, kv_head, tokens, dim]
    """
    match storage:
        case ModelDtype():
            return [x]
        case InKeys():
            return []
        case Float():
            return [clamped(x, storage.torch_dtype)]
        case Fp8(scale="none"):
            return [_fp8(x.float(), storage)]
        case Fp8(scale="tensor" | "head"):
            return [_fp8(x.float() / parts[1][..., None], storage)]
        case Fp8():
            scale = clamped(x.float().abs().amax(-1) / storage.largest, scale_dtype(storage.scale_dtype))
            return [_fp8(x.float() / _divisor(scale)[..., None], storage), scale]
        case Int8():
            scale = clamped(x.float().abs().amax(-1) / 127, scale_dtype(storage.scale_dtype))
            q = torch.round(x.float() / _divisor(scale)[..., None]).clamp(-127, 127)
            return [q.to(torch.int8), scale]
        case Affine():
            grouped = x.float().unflatten(-1, (storage.groups(x.shape[-1]), -1))
            q, scale, minimum = quantized(grouped, -1, storage.bits, scale_dtype(storage.scale_dtype))
            return [pack(q.flatten(-2), storage.bits), scale, minimum]
        case Rotated(inner=inner):
            turned = hadamard(x).to(x.dtype) if isinstance(inner, ModelDtype) else hadamard(x)
            return encode(inner, turned, parts)
        case Recent() | PerChannel():
            raise ValueError(f"{storage}: what the newest tokens are encoded as depends on the others")


def decode(storage: Storage, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The storage's parts -> x [..., dim] in `dtype`."""
    match storage:
        case ModelDtype() | Float():
            return parts[0].to(dtype)
        case Fp8(scale="none"):
            return _numbers(storage, parts[0]).to(dtype)
        case Int8() | Fp8():
            data, scale = parts
            return (_numbers(storage, data).float() * scale.float()[..., None]).to(dtype)
        case Affine():
            data, scale, minimum = parts
            q = unpack(data, storage.bits)
            grouped = q.unflatten(-1, (storage.groups(q.shape[-1]), -1))
            return dequantized(grouped, scale, minimum, -1).flatten(-2).to(dtype)
        case Rotated(inner=inner):
            return hadamard(decode(inner, parts, torch.float32)).to(dtype)
        case InKeys():
            raise ValueError("values that are kept in the keys have no parts of their own: see `leading`")
        case Recent() | PerChannel():
            raise ValueError(f"{storage}: how the newest tokens are read depends on who reads them")


def as_stored(storage: Storage, read: Storage, x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """x as it comes back, in the basis of `read`; parts: as for `encode`."""
    fixed = parts[1:2] if storage.calibration else []
    return decode(read, [*encode(storage, x, parts), *fixed], x.dtype)


def quantized(x: Tensor, dim: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x fp32 -> codes of its shape, as `unpack` gives them, and scale and minimum in `dtype` without `dim`."""
    low, high, levels = x.amin(dim), x.amax(dim), 2**bits - 1
    minimum = clamped(low, dtype)
    scale = clamped((high - low) / levels, dtype)
    shifted = x - minimum.float().unsqueeze(dim)
    q = torch.round(shifted / _divisor(scale).unsqueeze(dim)).clamp(0, levels)
    return q if current().portable else q.to(torch.uint8), scale, minimum


def dequantized(codes: Tensor, scale: Tensor, minimum: Tensor, dim: int) -> Tensor:
    """The inverse of `quantized`, fp32."""
    x: Tensor = codes.float() * scale.float().unsqueeze(dim) + minimum.float().unsqueeze(dim)
    return x


def turned(storage: Storage, x: Tensor) -> Tensor:
    """x [..., dim] in the basis that the storage keeps vectors in; fp32 where that is another."""
    return hadamard(x) if isinstance(storage, Rotated) else x


def leading(storage: Storage, parts: list[Tensor], channels: int) -> tuple[Storage, list[Tensor]]:
    """The first channels of vectors that are stored as `parts`: values that are kept in the keys."""
    if isinstance(storage, (Affine, Rotated)):  # channels far apart share a byte, or all of a block
        return ModelDtype(), [decode(storage, parts, torch.float32)[..., :channels]]
    return storage, [parts[0][..., :channels], *parts[1:]]


def dot_keys(storage: Storage, q: Tensor, parts: list[Tensor]) -> Tensor:
    """One query per head against stored keys: q [B, Hkv, G, D], parts [B, Hkv, T, ...] -> fp32 [B, Hkv, G, T].

    A scale of whole vectors multiplies the scores, never the elements.
    """
    if _scaled(storage):
        data, scale = parts
        return _dot(q, _numbers(storage, data)) * scale.float()[:, :, None]
    return _dot(q, decode(storage, parts, q.dtype))


def weigh_values(storage: Storage, p: Tensor, parts: list[Tensor]) -> Tensor:
    """Probabilities times stored values: p fp32 [B, Hkv, G, T], parts [B, Hkv, T, ...] -> fp32 [B, Hkv, G, Dv]."""
    if _scaled(storage):
        data, scale = parts
        return _weigh(p * scale.float()[:, :, None], _numbers(storage, data))
    return _weigh(p, decode(storage, parts, torch.float32))


def clamped(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, at most its largest finite number."""
    largest = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= largest:
        return x.to(dtype)
    # bfloat16 has no 65504: there the bound itself would be rounded up, to what float16 cannot hold.
    return x.to(torch.promote_types(x.dtype, torch.float32)).clamp(-largest, largest).to(dtype)


def _scaled(storage: Storage) -> bool:
    """Whether a vector is its elements times one scale."""
    return isinstance(storage, Int8) or (isinstance(storage, Fp8) and storage.scale != "none")


def _fp8(x: Tensor, storage: Fp8) -> Tensor:
    """x fp32 as the dialect stores it."""
    x = x.clamp(-storage.largest, storage.largest)
    return to_code(x, storage.torch_dtype) if current().portable else x.to(storage.torch_dtype)


def _numbers(storage: Storage, data: Tensor) -> Tensor:
    """Stored numbers as numbers: what the dialect keeps as codes is decoded."""
    if isinstance(storage, Fp8) and data.dtype != storage.torch_dtype:
        return from_code(data, storage.torch_dtype)
    return data


def _dot(q: Tensor, k: Tensor) -> Tensor:
    if current().portable:
        return torch.matmul(q.float(), k.float().transpose(-1, -2))
    # A product and a sum, not a matmul: for one query, Inductor fuses it with the dequantization and reads
    # each key once from memory, where a batched GEMV of one row is 1.1x (fp32) to 3x (int8) slower on CPUs.
    product: Tensor = q.float()[:, :, :, None] * k.float()[:, :, None]
    return product.sum(-1)


def _weigh(p: Tensor, v: Tensor) -> Tensor:
    if current().portable:
        return torch.matmul(p, v.float())
    return (p[..., None] * v.float()[:, :, None]).sum(-2)


def _divisor(scale: Tensor) -> Tensor:
    scale = scale.float()
    return torch.where(scale == 0, 1.0, scale)
