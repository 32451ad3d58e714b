"""Launches a kernel: its arguments are filled in by name, so that callers know no order and no strides.

In the interpreter the kernel is called as it is. Else it goes through `torch.library.wrap_triton`: then make_fx and
Inductor see a launch of this kernel on these tensors, with the grid as an expression of their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcompile.kernels.triton.device import interpreted
from kvcompile.kernels.triton.host.source import Kernel
from kvcompile.kernels.triton.params import TensorParam
from kvcompile.layouts.storage import is_fp8


class Recorded(NamedTuple):
    """What `launch` was called with."""

    kernel: Kernel
    grid: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int | float]
    num_warps: int
    num_stages: int


def known(kernel: Kernel, tensors: Mapping[str, Tensor]) -> tuple[tuple[str, int], ...]:
    """What a launch says of its arguments, by name: 16, a multiple of it; 1, the number, which is a constant then.

    As Triton's launcher specialises: addresses (tensors begin at multiples of 16 bytes) and strides; of sizes it is
    told to know nothing (`render.py`).
    """
    found: dict[str, int] = {}
    for param in kernel.source.params:
        if isinstance(param, TensorParam):
            tensor = tensors[param.name]
            pointer, *strides = param.names
            found[pointer] = 16
            for name, stride in zip(strides, tensor.stride(), strict=False):
                if stride == 1 or stride % 16 == 0:
                    found[name] = 1 if stride == 1 else 16
    return tuple(found.items())


_RECORD: ContextVar[list[Recorded] | None] = ContextVar("launches that are recorded", default=None)


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, int | float] | None = None,
    *,
    num_warps: int = 4,
    num_stages: int = 2,
) -> None:
    """Run `kernel` over `grid` (one to three numbers of programs, none of them 0).

    tensors: by `TensorParam.name`, each of its dtype, and of its rank and dense in its last dimension or (rank 0) dense
        altogether; fp8 may come where bytes are asked for
    sizes:   by `ScalarParam.name`

    Raises:
        TypeError: an argument is missing, not known, or not of the kind that the kernel was generated for.
    """
    values = arguments(kernel, tensors, sizes or {})
    record = _RECORD.get()
    if record is not None:
        record.append(Recorded(kernel, grid, tensors, sizes or {}, num_warps, num_stages))
        return
    if interpreted():
        kernel.function[grid](**values)
        return
    torch.library.wrap_triton(kernel.function)[grid](**values, num_warps=num_warps, num_stages=num_stages)


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Within it nothing runs: what would have been launched is in the list."""
    record: list[Recorded] = []
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def arguments(
    kernel: Kernel, tensors: Mapping[str, Tensor], sizes: Mapping[str, int | float]
) -> dict[str, Any]:
    """The kernel's arguments by their names in its signature; raises as `launch`."""
    params = kernel.source.params
    wanted, given = {param.name for param in params}, {*tensors, *sizes}
    if wanted != given:
        missing, unknown = sorted(wanted - given), sorted(given - wanted)
        raise TypeError(f"{kernel.spec.role} kernel: missing {missing}, unknown {unknown}")
    values: dict[str, Any] = {}
    for param in params:
        if isinstance(param, TensorParam):
            tensor = _fitting(kernel, param, tensors[param.name])
            values |= zip(param.names, (tensor, *tensor.stride()[: param.strides]), strict=True)
        else:
            values[param.name] = sizes[param.name]
    return values


def _fitting(kernel: Kernel, param: TensorParam, tensor: Tensor) -> Tensor:
    if param.dtype == torch.uint8 and is_fp8(tensor.dtype):
        tensor = tensor.view(torch.uint8)
    said = f"{kernel.spec.role} kernel: {param.name}"
    if tensor.dtype != param.dtype or (param.rank and tensor.dim() != param.rank):
        expected = f"{param.dtype} of {param.rank}" if param.rank else str(param.dtype)
        raise TypeError(f"{said} is {tensor.dtype} of {tensor.dim()} dimensions, expected {expected}")
    if not param.rank and not tensor.is_contiguous():
        raise TypeError(
            f"{said} {tuple(tensor.shape)} has strides {tensor.stride()}, expected it without gaps"
        )
    if param.rank and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise TypeError(
            f"{said} {tuple(tensor.shape)} has stride {tensor.stride(-1)} in its last dimension, expected 1"
        )
    return tensor
