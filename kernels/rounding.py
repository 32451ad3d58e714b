"""What a storage makes of a sequence of vectors, for the oracle: no parts, no packing, no slots, no steps.

Everything is said again, from the definitions in `layouts/storages`, so that nothing of `codec`, `bits`, `hadamard`
and `recent` is shared with it. The arithmetic is the same, in fp32 and in the same order: values on the edge
between two steps fall to the same side.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def older_and_newest(storage: Storage, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [H, T, D] of whole sequences from position 0 -> as old tokens come back, and as new ones do; in x's dtype.

    scale: the calibrated scales fp32 [H], where the storage has such.
    """
    match storage:
        case Rotated(inner=inner):
            y = _spread(x.float())
            rounds = isinstance(inner, (Float, Fp8, Int8, Affine))
            older, newest = older_and_newest(inner, y if rounds else y.to(x.dtype), scale)
            return _spread(older.float()).to(x.dtype), _spread(newest.float()).to(x.dtype)
        case Recent(inner=inner, sinks=sinks):
            older = _rounded(inner, x.float(), scale).to(x.dtype)
            return torch.cat([x[:, :sinks], older[:, sinks:]], dim=1), x
        case PerChannel(bits=bits, group=group):
            older = torch.zeros_like(x)  # of a group that is not whole: never read
            for start in range(0, x.shape[1] - group + 1, group):
                channels = x[:, start : start + group].float().transpose(1, 2)
                grid = _to_levels(channels, bits, storage.scale_dtype)
                older[:, start : start + group] = grid.transpose(1, 2)
            older[:, : storage.sinks] = x[:, : storage.sinks]
            return older, x
        case ModelDtype() | InKeys():
            return x, x
        case _:
            x = _rounded(storage, x.float(), scale).to(x.dtype)
            return x, x


def newest_from(storage: Storage, count: int) -> int:
    """The first of `count` tokens that the last of them sees as a new one; `count` where none are."""
    match storage:
        case Rotated(inner=inner):
            return newest_from(inner, count)
        case Recent(residual=residual):
            return max(0, count - residual)
        case PerChannel(residual=residual):
            return count // residual * residual
        case _:
            return count


def _rounded(storage: Float | Fp8 | Int8 | Affine, x: Tensor, calibrated: Tensor | None) -> Tensor:
    """x fp32 [..., D] as it comes back, fp32."""
    match storage:
        case Float():
            largest = torch.finfo(storage.torch_dtype).max
            return x.clamp(-largest, largest).to(storage.torch_dtype).float()
        case Fp8(scale="none"):
            largest = torch.finfo(storage.torch_dtype).max
            return x.clamp(-largest, largest).to(storage.torch_dtype).float()
        case Fp8(scale="tensor" | "head"):
            assert calibrated is not None
            of_heads = [
                (head / s).clamp(-448.0, 448.0).to(storage.torch_dtype).float() * s
                for head, s in zip(x, calibrated, strict=True)
            ]
            return torch.stack(of_heads)
        case Fp8():
            scale = _kept(x.abs().max(-1, keepdim=True).values / 448.0, storage.scale_dtype)
            safe = scale + (scale == 0).float()
            return (x / safe).clamp(-448.0, 448.0).to(storage.torch_dtype).float() * scale
        case Int8():
            scale = _kept(x.abs().max(-1, keepdim=True).values / 127, storage.scale_dtype)
            safe = scale + (scale == 0).float()
            return (x / safe).round().clamp(-127, 127) * scale
        case Affine():
            size = storage.group or x.shape[-1]
            groups = [_to_levels(part, storage.bits, storage.scale_dtype) for part in x.split(size, dim=-1)]
            return torch.cat(groups, dim=-1)


def _to_levels(x: Tensor, bits: int, dtype: str) -> Tensor:
    """The rows of x [..., n], each on a grid of 2^bits levels between its extremes."""
    low, high = x.min(-1, keepdim=True).values, x.max(-1, keepdim=True).values
    steps = 2**bits - 1
    base, scale = _kept(low, dtype), _kept((high - low) / steps, dtype)
    safe = scale + (scale == 0).float()
    return ((x - base) / safe).round().clamp(0, steps) * scale + base


def _kept(x: Tensor, dtype: str) -> Tensor:
    """x as a scale's dtype gives it back."""
    largest = torch.finfo(getattr(torch, dtype)).max
    return x.clamp(-largest, largest).to(getattr(torch, dtype)).float()


def _spread(x: Tensor) -> Tensor:
    """The Hadamard rotation of x [..., D], in blocks of the largest power of two that divides D (Sylvester)."""
    size = 1
    while x.shape[-1] % (2 * size) == 0:
        size *= 2

    def turn(y: Tensor) -> Tensor:
        if y.shape[-1] == 1:
            return y
        a, b = (turn(half) for half in y.split(y.shape[-1] // 2, dim=-1))
        return torch.cat([a + b, a - b], dim=-1)

    return torch.cat([turn(part) * size**-0.5 for part in x.split(size, dim=-1)], dim=-1)
