"""Quantizes and dequantizes vectors as a storage does, for the oracle: no parts, no packing, no slots, no steps.

Everything is said again, from the definitions in `layouts/storage`, so that nothing of `codec`, `codes`, `bits`,
`hadamard` and `recent` is shared with it. The arithmetic is the same, in fp32 and in the same order: values on the edge
between two steps fall to the same side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.layouts import InKeys, Storage


def older_and_newest(
    storage: Storage | InKeys, x: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [H, T, D] of whole sequences from position 0 -> as old tokens come back, and as new ones do; in x's dtype.

    scale: the calibrated scales fp32 [H], where the storage has such.
    """
    if isinstance(storage, InKeys):
        return x, x
    if storage.hadamard:
        y = _spread(x.float())
        # Vectors that stay in the model's dtype, for ever or for a while, are rounded to it first.
        kept = storage.residual or storage.sinks or storage.code == "model"
        older, newest = older_and_newest(storage.without_hadamard, y.to(x.dtype) if kept else y, scale)
        turned = _spread(older.float()).to(x.dtype)
        return turned, turned if newest is older else _spread(newest.float()).to(x.dtype)
    if storage.scale.per == "channel":
        older = torch.zeros_like(x)  # of a group that is not whole: never read
        size = storage.scale.size
        for start in range(0, x.shape[1] - size + 1, size):
            channels = x[:, start : start + size].float().transpose(1, 2)
            older[:, start : start + size] = _on_grid(storage, channels).transpose(1, 2)
    else:
        older = x if storage.code == "model" else _rounded(storage, x.float(), scale).to(x.dtype)
    if not (storage.residual or storage.sinks):
        return older, older
    return torch.cat([x[:, : storage.sinks], older[:, storage.sinks :]], dim=1), x


def newest_from(storage: Storage | InKeys, count: int) -> int:
    """The first of `count` tokens that the last of them sees as a new one; `count` where none are."""
    if isinstance(storage, InKeys) or not storage.residual:
        return count
    if storage.scale.per == "channel":
        return count // storage.residual * storage.residual
    return max(0, count - storage.residual)


def _rounded(storage: Storage, x: Tensor, calibrated: Tensor | None) -> Tensor:
    """x fp32 [..., D], each vector by itself, as it comes back; fp32."""
    match storage.scale.per:
        case "none":
            dtype = storage.element.dtype
            assert dtype is not None
            largest = torch.finfo(dtype).max
            return x.clamp(-largest, largest).to(dtype).float()
        case "tensor" | "head":
            assert calibrated is not None
            of_heads = [_element(storage, head / s) * s for head, s in zip(x, calibrated, strict=True)]
            return torch.stack(of_heads)
        case _:
            size = storage.scale.size if storage.scale.per == "group" else 0
            return torch.cat(
                [_on_grid(storage, part) for part in x.split(size or x.shape[-1], dim=-1)], dim=-1
            )


def _on_grid(storage: Storage, x: Tensor) -> Tensor:
    """The rows of x fp32 [..., n], each of which has one scale, and one minimum if any."""
    dtype, most = storage.scale.dtype, storage.element.largest
    if storage.scale.minimum:
        low, high = x.min(-1, keepdim=True).values, x.max(-1, keepdim=True).values
        base, scale = _kept(low, dtype), _kept((high - low) / most, dtype)
        safe = scale + (scale == 0).float()
        return ((x - base) / safe).round().clamp(0, most) * scale + base
    peak = x.abs().max(-1, keepdim=True).values
    scale = _power_of_two(peak, most) if dtype == "e8m0" else _kept(peak / most, dtype)
    safe = scale + (scale == 0).float()
    return _element(storage, x / safe) * scale


def _element(storage: Storage, x: Tensor) -> Tensor:
    """Scaled numbers as their code gives them back."""
    element = storage.element
    match storage.code:
        case "int8":
            return x.round().clamp(-127, 127)
        case "e2m1":
            # Numbers of one mantissa bit: steps of a half up to 2, then of 1, then of 2; halves of a step to even.
            size = x.abs()
            step = 0.5 * (1 + (size >= 2).float() + 2 * (size >= 4).float())
            return ((size / step).round() * step).clamp(max=6.0).copysign(x)
        case _ if element.kind == "fp8":
            assert element.dtype is not None
            return x.clamp(-448.0, 448.0).to(element.dtype).float()
        case _:
            # A codebook: the nearest level. On the middle between two, the lower one.
            levels = torch.tensor(element.numbers, device=x.device)
            middles = (levels[1:] + levels[:-1]) / 2
            return levels[torch.bucketize(x.contiguous(), middles)]


def _kept(x: Tensor, dtype: str) -> Tensor:
    """x as a scale's dtype gives it back."""
    largest = torch.finfo(getattr(torch, dtype)).max
    return x.clamp(-largest, largest).to(getattr(torch, dtype)).float()


def _power_of_two(peak: Tensor, most: float) -> Tensor:
    """2^(floor(log2 peak) - floor(log2 most)), at least 2^-127; no number where `peak` is none."""
    peak = peak.clamp(max=torch.finfo(torch.float32).max)
    exponent = torch.frexp(peak).exponent - torch.frexp(torch.tensor(most)).exponent
    exponent = torch.where(peak == 0, -127, exponent).clamp(min=-127)
    return torch.where(peak.isnan(), peak, torch.ldexp(torch.ones_like(peak), exponent))


def _spread(x: Tensor) -> Tensor:
    """The Hadamard transform of x [..., D], in blocks of the largest power of two that divides D (Sylvester)."""
    size = 1
    while x.shape[-1] % (2 * size) == 0:
        size *= 2

    def turn(y: Tensor) -> Tensor:
        if y.shape[-1] == 1:
            return y
        a, b = (turn(half) for half in y.split(y.shape[-1] // 2, dim=-1))
        return torch.cat([a + b, a - b], dim=-1)

    return torch.cat([turn(part) * size**-0.5 for part in x.split(size, dim=-1)], dim=-1)
