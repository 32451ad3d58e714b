"""Linear layers of one token by a generated kernel: which take it, and how it is cut up.

A thread reads 16 bytes with one load, a warp 32 times that of a row. Tiles are as wide as four warps, if a row is. Of
rows a program has as many as its registers hold at once, and fewer where programs would be too few for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.device import INTERPRETER, Device, device_of, interpreted
from kvcompile.kernels.triton.host import ops_linear
from kvcompile.kernels.triton.linear.linear import LOADS, places
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import CacheLayout

MOST = 16  # layers of one launch
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_VECTOR = 16  # bytes of a load
_WARP, _WARPS = 32, 4
_ROWS = 8  # of a program, at most
_FEW = 16  # loads of a thread: more only for two rows, so that the token is not read again for each
_PROGRAMS = 4  # of a multiprocessor, at least


def takes(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Whether the kernel reads these with whole vectors: of one dtype, dense rows that are multiples of 16 apart."""
    fits = all(
        weight.dtype == x.dtype
        and weight.dim() == 2
        and weight.stride(1) == 1
        and weight.stride(0) % 16 == 0
        and weight.shape[0]
        for weight in weights
    )
    if len(weights) > MOST or len(biases) not in (0, len(weights)):
        return False
    same = all(  # one number for all rows is a bias as well, which PyTorch broadcasts
        bias.dtype == x.dtype and bias.is_contiguous() and bias.shape == weight.shape[:1]
        for bias, weight in zip(biases, weights, strict=False)
    )
    return fits and same and x.dtype in _DTYPES


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """Layers of the same token in one launch, of tensors that it `takes`.

    Args:
        x: [1, .., K]. weights: [N, K] each; biases: [N] of each, or none.

    Returns:
        [1, .., N] of each layer.
    """
    rows = [weight.shape[0] for weight in weights]
    out = _run(x, weights, biases, rows, None)
    first = places(rows)
    return [
        out[begin : begin + count].view(*x.shape[:-1], count)
        for begin, count in zip(first, rows, strict=False)
    ]


def gated(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str) -> Tensor:
    """act(x G^T + b) * (x U^T + b') in one launch, of tensors that it `takes`: [1, .., N].

    Args:
        weights: of the gate, and of what it opens, both [N, K]; biases: of both, or none.
        activation: a key of `linear.ACTIVATIONS`.
    """
    rows = weights[0].shape[0]
    return _run(x, weights, biases, [rows], activation)[:rows].view(*x.shape[:-1], rows)


def _run(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    rows: Sequence[int],
    activation: str | None,
) -> Tensor:
    spec, warps = form(
        weights[0].shape[1], rows, len(weights), x.dtype, device_of(x.device), bool(biases), activation
    )
    made: Tensor = ops_linear.linear(
        x.contiguous().view(-1), list(weights), list(biases), warps, spec.to_json()
    )
    return made


def form(
    columns: int,
    rows: Sequence[int],
    layers: int,
    dtype: torch.dtype,
    device: Device,
    biased: bool = False,
    activation: str | None = None,
) -> tuple[KernelSpec, int]:
    """The kernel of such layers, and its warps. rows: of each result"""
    wide = _WARP * _VECTOR // dtype.itemsize  # columns that a warp reads with one load a thread
    warps = _WARPS
    while warps > 1 and warps * wide > columns:
        warps //= 2
    block = warps * wide
    sides = 2 if activation else 1
    each = -(-columns // block)  # loads of a thread for a row
    count = _ROWS
    while count > 1 and (count * sides * each > (LOADS if count * sides <= 2 else _FEW)):
        count //= 2
    while count > 1 and sum(-(-of // count) for of in rows) < _PROGRAMS * device.multiprocessors:
        count //= 2
    if device.arch == INTERPRETER:  # so that tests meet edges of tiles
        block, count, warps = min(block, 64), 2, 1
    options = {f"channels[{columns}]", f"layers[{layers}]"} | ({activation} if activation else set())
    options |= ({"bias"} if biased else set()) | ({"interpreted"} if interpreted() else set())
    site = SiteSpec(CacheLayout(), 1.0)  # a spec has one; this role asks nothing of it
    name = str(dtype).removeprefix("torch.")
    spec = KernelSpec("linear", site, 1, 1, 1, 1, name, count, block, options=tuple(sorted(options)))
    return spec, warps
