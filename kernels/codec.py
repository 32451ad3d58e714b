"""Encoding and decoding of K and V vectors, by storage. Shapes: x [..., dim]; parts as `Storage.parts` has them.

int8: q = round(x / s), s = absmax / 127, kept in the scale's dtype (the rounded scale is what divides).
int4: q = round((x - m) / s), m = min, s = (max - min) / 15 per group of channels.
A row of one value has s = 0 (or is all minimum): the divisor is then 1, and decoding gives the value back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.layouts import InKeys, Int4, Int8, ModelDtype, Storage


def encode(storage: Storage, x: Tensor) -> list[Tensor]:
    """x [..., dim] -> the storage's parts, each [..., *part.shape]."""
    match storage:
        case ModelDtype():
            return [x]
        case InKeys():
            return []
        case Int8():
            scale = (x.float().abs().amax(-1) / 127).to(getattr(torch, storage.scale_dtype))
            q = torch.round(x.float() / _divisor(scale)[..., None]).clamp(-127, 127)
            return [q.to(torch.int8), scale]
        case Int4():
            grouped = x.float().unflatten(-1, (storage.groups(x.shape[-1]), -1))
            dtype = getattr(torch, storage.scale_dtype)
            minimum = grouped.amin(-1).to(dtype)
            scale = ((grouped.amax(-1) - grouped.amin(-1)) / 15).to(dtype)
            q = torch.round((grouped - minimum.float()[..., None]) / _divisor(scale)[..., None]).clamp(0, 15)
            low, high = q.flatten(-2).to(torch.uint8).chunk(2, dim=-1)
            return [low | (high << 4), scale, minimum]


def decode(storage: Storage, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The storage's parts -> x [..., dim] in `dtype`."""
    match storage:
        case ModelDtype():
            return parts[0].to(dtype)
        case Int8():
            data, scale = parts
            return (data.float() * scale.float()[..., None]).to(dtype)
        case Int4():
            data, scale, minimum = parts
            q = torch.cat([data & 15, data >> 4], dim=-1).float()
            grouped = q.unflatten(-1, (storage.groups(q.shape[-1]), -1))
            x: Tensor = grouped * scale.float()[..., None] + minimum.float()[..., None]
            return x.flatten(-2).to(dtype)
        case InKeys():
            raise ValueError("values that are kept in the keys have no parts of their own: see `leading`")


def leading(storage: Storage, parts: list[Tensor], channels: int) -> tuple[Storage, list[Tensor]]:
    """The first channels of vectors that are stored as `parts`: values that are kept in the keys."""
    if isinstance(storage, Int4):  # two channels far apart share a byte
        return ModelDtype(), [decode(storage, parts, torch.float32)[..., :channels]]
    return storage, [parts[0][..., :channels], *parts[1:]]


def dot_keys(storage: Storage, q: Tensor, parts: list[Tensor]) -> Tensor:
    """One query per head against stored keys: q [B, Hkv, G, D], parts [B, Hkv, T, ...] -> fp32 [B, Hkv, G, T].

    A scale per token multiplies the scores, never the elements.
    """
    if isinstance(storage, Int8):
        data, scale = parts
        return _dot(q, data) * scale.float()[:, :, None]
    return _dot(q, decode(storage, parts, q.dtype))


def weigh_values(storage: Storage, p: Tensor, parts: list[Tensor]) -> Tensor:
    """Probabilities times stored values: p fp32 [B, Hkv, G, T], parts [B, Hkv, T, ...] -> fp32 [B, Hkv, G, Dv]."""
    if isinstance(storage, Int8):
        data, scale = parts
        return _weigh(p * scale.float()[:, :, None], data)
    return _weigh(p, decode(storage, parts, torch.float32))


def _dot(q: Tensor, k: Tensor) -> Tensor:
    # A product and a sum, not a matmul: for one query, Inductor fuses it with the dequantization and reads
    # each key once from memory, where a batched GEMV of one row is 1.1x (fp32) to 3x (int8) slower on CPUs.
    product: Tensor = q.float()[:, :, :, None] * k.float()[:, :, None]
    return product.sum(-1)


def _weigh(p: Tensor, v: Tensor) -> Tensor:
    return (p[..., None] * v.float()[:, :, None]).sum(-2)


def _divisor(scale: Tensor) -> Tensor:
    scale = scale.float()
    return torch.where(scale == 0, 1.0, scale)
