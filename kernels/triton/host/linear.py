"""Linear layers of one token by a generated kernel: which take it, and how it is cut up.

A thread reads 16 bytes with one load, a warp 32 times that of a row. A program has two rows, so that a token that is
read once serves both, and of a gate two of each side where its registers hold them. Of short rows it has eight warps,
of long ones two, of those that take a loop one, where it norms the token four. So an H200 measured rows of 1 to 8 and
warps of 1 to 16, over the layers of models from 1 to 70 billion weights (`docs/kernels.md`): at most a ninth behind the
best of a shape.

A LayerNorm is not measured. What a program reads of it, with the token, is more than two rows of weights, so it has
four of them, and where registers do not hold these it is a launch by itself. So the model of an H200 would have it: it
gives 1 us more for layers of up to 3,072 columns in bfloat16, where that launch takes 1.6, and 5 and more for longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.device import INTERPRETER, Device, device_of, interpreted
from kvcompile.kernels.triton.host import ops_linear
from kvcompile.kernels.triton.linear.linear import LOADS, places
from kvcompile.kernels.triton.linear.norm import NormForm
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import CacheLayout

MOST = 16  # layers of one launch
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_VECTOR = 16  # bytes of a load
_WARP = 32
_SHORT, _LONG, _NORMING = 8, 2, 4  # warps for short rows, for long ones, and where the token is normed
_COLUMNS = 4096  # of short rows, at most
_ROWS, _MANY = 2, 4  # of a program, of each of its weights; and behind a LayerNorm
_FEW = 16  # loads of a thread that norms the token, of weights
_NORMED = 32  # of those as well that are of the norm and the token
_CENTRED = 3  # of a row behind a LayerNorm
_PROGRAMS, _ALONE = 2, 12  # of a multiprocessor, at least; of single warps


def takes(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Whether the kernel reads these with whole vectors: of one dtype, dense rows at multiples of 16."""
    fits = all(
        weight.dtype == x.dtype
        and weight.dim() == 2
        and weight.stride(1) == 1
        and weight.stride(0) % 16 == 0
        and weight.storage_offset() * weight.dtype.itemsize % _VECTOR == 0
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


class Norm(NamedTuple):
    """The norm of the token, before its layers.

    tensors: [K] each, as of `NormForm.tensors`: what its numbers are multiplied by, and what is added to them
    kept: whether somebody else reads the token behind it
    """

    form: NormForm
    tensors: tuple[Tensor, ...]
    kept: bool = False


def norm_in(how: str, eps: float, tensors: Sequence[Tensor], kept: bool = False) -> Norm:
    """The norm that a graph says so (`compile/norm_forms.py`); where a token is centred it is a LayerNorm."""
    words = frozenset(how.split())
    layer = bool(words & {"layer", "centred"})
    return Norm(NormForm(eps, layer, words - {"layer", "centred"}), tuple(tensors), kept)


def takes_norm(x: Tensor, norm: Norm, sides: int = 1) -> bool:
    """Whether the kernel norms the token itself: weights of its dtype, and rows that registers hold.

    sides: weights of which a program has rows: 2 of a gate and what it opens
    """
    columns = x.shape[-1]
    fits = all(of.dtype == x.dtype and of.shape == (columns,) and of.is_contiguous() for of in norm.tensors)
    return fits and holds_norm(columns, x.dtype, device_of(x.device), norm.form, sides)


def holds_norm(columns: int, dtype: torch.dtype, device: Device, norm: NormForm, sides: int = 1) -> bool:
    """Whether the registers of a program hold a token that it norms, its norm, and rows of each of its weights."""
    each = -(-columns // _tile(columns, dtype, device, True)[0])
    if norm.layer and each > _CENTRED and device.arch != INTERPRETER:  # which has small tiles
        return False
    return each * (sides + 1 + len(norm.tensors)) <= _NORMED


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), norm: Norm | None = None
) -> list[Tensor]:
    """Layers of the same token in one launch, of tensors that it `takes`.

    Args:
        x: [1, .., K]. weights: [N, K] each; biases: [N] of each, or none. norm: of x, before them; it `takes_norm`.

    Returns:
        [1, .., N] of each layer; then [1, .., K], the token behind its norm, where it is kept.
    """
    rows = [weight.shape[0] for weight in weights]
    out = _run(x, weights, biases, rows, norm=norm)
    rows += [x.shape[-1]] if norm is not None and norm.kept else []
    first = places(rows)
    return [
        out[begin : begin + count].view(*x.shape[:-1], count)
        for begin, count in zip(first, rows, strict=False)
    ]


def gated(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    norm: Norm | None = None,
) -> Tensor:
    """act(x G^T + b) * (x U^T + b') in one launch, of tensors that it `takes`: [1, .., N].

    Args:
        weights: of the gate, and of what it opens, both [N, K]; biases: of both, or none.
        activation: a key of `linear.ACTIVATIONS`. norm: as of `linears`.
    """
    rows = weights[0].shape[0]
    return _run(x, weights, biases, [rows], activation, norm)[:rows].view(*x.shape[:-1], rows)


def activated(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, norm: Norm | None = None
) -> Tensor:
    """act(x W^T + b) in one launch, of tensors that it `takes`; arguments: as of `gated`."""
    rows = weight.shape[0]
    biases = [] if bias is None else [bias]
    return _run(x, [weight], biases, [rows], activation, norm)[:rows].view(*x.shape[:-1], rows)


def takes_residual(x: Tensor, weight: Tensor, residual: Tensor) -> bool:
    """Whether a layer's results can be added to `residual` where they are made."""
    return residual.dtype == x.dtype and residual.shape == (*x.shape[:-1], weight.shape[0])


def added(
    x: Tensor, weight: Tensor, bias: Tensor | None, residuals: Sequence[Tensor], factor: float = 1.0
) -> Tensor:
    """residual + factor * (x W^T + b) in one launch, of tensors that it `takes` and `takes_residual`: [1, .., N].

    residuals: one, or two, of which the second is added to what the first gives
    """
    rows = weight.shape[0]
    out = _run(x, [weight], [] if bias is None else [bias], [rows], residuals=residuals, factor=factor)
    return out[:rows].view(*x.shape[:-1], rows)


def _run(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    rows: Sequence[int],
    activation: str | None = None,
    norm: Norm | None = None,
    residuals: Sequence[Tensor] = (),
    factor: float = 1.0,
) -> Tensor:
    spec, warps = form(
        weights[0].shape[1],
        rows,
        len(weights),
        x.dtype,
        device_of(x.device),
        bool(biases),
        activation,
        None if norm is None else norm.form,
        len(residuals),
        factor,
        norm is not None and norm.kept,
    )
    made: Tensor = ops_linear.linear(
        x.contiguous().view(-1),
        list(weights),
        list(biases),
        [] if norm is None else list(norm.tensors),
        [residual.contiguous().view(-1) for residual in residuals],
        warps,
        spec.to_json(),
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
    norm: NormForm | None = None,
    added: int = 0,
    factor: float = 1.0,
    kept: bool = False,
) -> tuple[KernelSpec, int]:
    """The kernel of such layers, and its warps.

    rows: of each result; norm: of the token, which is kept or not
    added: how many others a layer's results are added to; factor: by which they are multiplied before
    """
    block, warps = _tile(columns, dtype, device, norm is not None)
    sides = 2 if activation and layers == 2 else 1
    each = -(-columns // block)  # loads of a thread for a row
    count, most = _ROWS, LOADS if norm is None else _FEW
    many = norm is not None and norm.layer and sides == 1 and _MANY * each <= _FEW
    if many and _programs(rows, _MANY) >= _PROGRAMS * device.multiprocessors:
        count = _MANY
    if (sides == 2 or norm is not None) and count * sides * each > most:
        count = 1
    if _programs(rows, count) < _PROGRAMS * device.multiprocessors:
        count = 1
    in_turns = norm is None and count * sides * each > LOADS
    if in_turns and warps == _LONG and _programs(rows, count) >= _ALONE * device.multiprocessors:
        block, warps = block // _LONG, 1  # no thread waits for those of another warp
    if device.arch == INTERPRETER:  # so that tests meet edges of tiles
        count = 2
    options = {f"channels[{columns}]", f"layers[{layers}]"}
    options |= {activation} if activation else set()
    options |= set() if norm is None else norm.options
    options |= {f"factor[{factor!r}]"} if added and factor != 1.0 else set()
    given = {"bias": biased, "residual": added == 1, "residual[2]": added == 2, "kept": kept}
    given["interpreted"] = interpreted()
    options |= {name for name, there in given.items() if there}
    site = SiteSpec(CacheLayout(), 1.0)  # a spec has one; this role asks nothing of it
    name = str(dtype).removeprefix("torch.")
    spec = KernelSpec("linear", site, 1, 1, 1, 1, name, count, block, options=tuple(sorted(options)))
    return spec, warps


def _programs(rows: Sequence[int], count: int) -> int:
    return sum(-(-of // count) for of in rows)


def _tile(columns: int, dtype: torch.dtype, device: Device, normed: bool) -> tuple[int, int]:
    """Columns that the threads of a program read with one load each, and its warps."""
    wide = _WARP * _VECTOR // dtype.itemsize
    warps = _NORMING if normed else _SHORT if columns <= _COLUMNS else _LONG
    while warps > 1 and warps * wide > columns:
        warps //= 2
    if device.arch == INTERPRETER:
        return min(warps * wide, 64), 1
    return warps * wide, warps
