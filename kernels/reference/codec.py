"""Encodes and decodes K and V vectors, by storage. Shapes: x [..., dim]; parts as `Storage.parts` has them.

    x ~ q * scale + minimum       q as its code writes it (`codes/`), per vector, or per group of its channels

without a minimum: scale = absmax / largest, with one: scale = (max - min) / (2^bits - 1). The scale as it is kept is
what divides; of a row of one value it is 0 (or the row is all minimum): the divisor is then 1, and decoding gives the
value back. A calibrated scale is what calibration has put into the part "scale" [batch, kv_head, 1].

What keeps the newest tokens unquantized is in `kernels/reference/residual.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompile.kernels.reference import codes
from kvcompile.kernels.reference.codes import floats, scales
from kvcompile.kernels.shared.dialect import current
from kvcompile.kernels.shared.hadamard import hadamard
from kvcompile.layouts import InKeys, Storage, model_dtype

MODEL = model_dtype()


def encode(storage: Storage, x: Tensor, parts: Sequence[Tensor] = ()) -> list[Tensor]:
    """x [..., dim] -> the storage's parts, each [..., *part.shape], without those that hold a calibrated scale.

    parts: the parts that x will be written to; needed only where a calibrated scale is among them, and then x is
        [batch, kv_head, tokens, dim]
    """
    if storage.unquantized:
        raise ValueError(f"{storage}: what the newest tokens are encoded as depends on the others")
    code, scale = storage.element, storage.scale
    if storage.hadamard:
        x = hadamard(x).to(x.dtype) if code.name == "model" else hadamard(x)
    match scale.per:
        case "none":
            x = x if code.kind == "float" else x.float()
            return [codes.packed(code, codes.codes_of(code, x, storage.largest))]
        case "tensor" | "head":
            scaled = x.float() / parts[1][..., None]
            return [codes.packed(code, codes.codes_of(code, scaled, storage.largest))]
        case "vector":
            found, numbers = quantized(storage, x.float(), -1)
            return [codes.packed(code, found), *numbers]
        case "group":
            grouped = x.float().unflatten(-1, (storage.groups(x.shape[-1]), -1))
            found, numbers = quantized(storage, grouped, -1)
            return [codes.packed(code, found.flatten(-2)), *numbers]
        case "channel":
            raise ValueError(f"{storage}: what a token is encoded as depends on the others of its group")


def decode(storage: Storage, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The storage's parts -> x [..., dim] in `dtype`."""
    if storage.unquantized:
        raise ValueError(f"{storage}: how the newest tokens are read depends on who reads them")
    if storage.hadamard:
        return hadamard(decode(storage.without_hadamard, parts, torch.float32)).to(dtype)
    data, *numbers = parts
    found = codes.numbers(storage.element, data)
    match storage.scale.per:
        case "none":
            return found.to(dtype)
        case "group":
            grouped = found.unflatten(-1, (storage.groups(found.shape[-1]), -1))
            return dequantized(storage, grouped, numbers, -1).flatten(-2).to(dtype)
        case "channel":
            raise ValueError(f"{storage}: what a token is read as depends on the others of its group")
        case _:
            return dequantized(storage, found, numbers, -1).to(dtype)


def as_stored(storage: Storage, read: Storage, x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """x as it comes back, in the basis of `read`; parts: as for `encode`."""
    fixed = parts[1:2] if storage.calibration else []
    return decode(read, [*encode(storage, x, parts), *fixed], x.dtype)


def quantized(storage: Storage, x: Tensor, dim: int) -> tuple[Tensor, list[Tensor]]:
    """x fp32 -> codes of its shape, before they are packed, and what shares `dim` in it: scale, and minimum if any."""
    code, scale = storage.element, storage.scale
    if not scale.minimum:
        kept = scales.kept(scale, x.abs().amax(dim), code.largest)
        scaled = x / scales.divisor(scales.numbers(scale, kept)).unsqueeze(dim)
        return codes.codes_of(code, scaled, code.largest), [kept]
    low, high = x.amin(dim), x.amax(dim)
    minimum = floats.clamped(low, scale.torch_dtype)
    kept = scales.kept(scale, high - low, code.largest)
    shifted = x - minimum.float().unsqueeze(dim)
    scaled = shifted / scales.divisor(scales.numbers(scale, kept)).unsqueeze(dim)
    return codes.codes_of(code, scaled, code.largest), [kept, minimum]


def dequantized(storage: Storage, found: Tensor, numbers: Sequence[Tensor], dim: int) -> Tensor:
    """The inverse of `quantized`, fp32; found: numbers of the codes' shape, before their scale."""
    x: Tensor = found.float() * scales.numbers(storage.scale, numbers[0]).unsqueeze(dim)
    return x + numbers[1].float().unsqueeze(dim) if storage.scale.minimum else x


def turned(storage: Storage | InKeys, x: Tensor) -> Tensor:
    """x [..., dim] in the basis that the storage keeps vectors in; fp32 where that is another."""
    return hadamard(x) if storage.hadamard else x


def leading(storage: Storage, parts: list[Tensor], channels: int) -> tuple[Storage, list[Tensor]]:
    """The first channels of vectors that are stored as `parts`: values that are kept in the keys."""
    # Channels far apart share a byte, a scale, or all of a block.
    if storage.element.packed or storage.scale.per == "group" or storage.hadamard:
        return MODEL, [decode(storage, parts, torch.float32)[..., :channels]]
    return storage, [parts[0][..., :channels], *parts[1:]]


def dot_keys(storage: Storage, q: Tensor, parts: list[Tensor]) -> Tensor:
    """One query per head against stored keys: q [B, Hkv, G, D], parts [B, Hkv, T, ...] -> fp32 [B, Hkv, G, T].

    A scale of whole vectors multiplies the scores, never the elements.
    """
    if _scaled(storage):
        data, scale = parts
        return _dot(q, codes.numbers(storage.element, data)) * _of_vectors(storage, scale)
    return _dot(q, decode(storage, parts, q.dtype))


def weigh_values(storage: Storage, p: Tensor, parts: list[Tensor]) -> Tensor:
    """Probabilities times stored values: p fp32 [B, Hkv, G, T], parts [B, Hkv, T, ...] -> fp32 [B, Hkv, G, Dv]."""
    if _scaled(storage):
        data, scale = parts
        return _weigh(p * _of_vectors(storage, scale), codes.numbers(storage.element, data))
    return _weigh(p, decode(storage, parts, torch.float32))


def _scaled(storage: Storage) -> bool:
    """Whether a vector is its elements times one scale."""
    return storage.scale.per in ("vector", "tensor", "head") and not storage.hadamard


def _of_vectors(storage: Storage, scale: Tensor) -> Tensor:
    """A scale per vector, or per head, as it multiplies [B, Hkv, G, T]."""
    return scales.numbers(storage.scale, scale)[:, :, None]


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
