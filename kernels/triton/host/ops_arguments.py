"""Arguments of kernels that attend, by their names, of what ops are given (`ops_attend.py`, `ops_prefill.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.triton.host.launch import launch
from kvcompile.kernels.triton.host.source import Kernel
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import expression


def launch_wanted(
    kernel: Kernel,
    grid: tuple[int, ...],
    given: Mapping[str, Tensor | None],
    sizes: Mapping[str, int],
    num_warps: int,
    num_stages: int,
) -> None:
    """Of what is there, what the kernel takes; `launch` finds what is missing."""
    wanted = {param.name for param in kernel.source.params}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None and name in wanted}
    own = {name: size for name, size in sizes.items() if name in wanted}
    launch(kernel, grid, tensors, own, num_warps=num_warps, num_stages=num_stages)


def parts_of(kernel: Kernel, buffers: list[Tensor], prefix: str = "") -> dict[str, Any]:
    """Buffers by the names of their parts. Those with rows of their own are the cache's alone."""
    spec, found = kernel.spec, []
    dtype = spec.torch_dtype
    for side, storage, dim in (
        ("keys", spec.as_read.keys, spec.head_dim),
        ("values", spec.as_read.values, spec.v_head_dim),
    ):
        parts = [part for part in storage.parts(dim, dtype) if not (prefix and part.fixed)]
        found += [f"{prefix}{side}_{part.name}" for part in parts]
    return dict(zip(found, buffers, strict=False)) if buffers else {}


def tables_of(rope: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("cos", "sin"), rope, strict=False))


def leaves_of(kernel: Kernel, leaves: list[Tensor]) -> dict[str, Tensor]:
    return {f"leaf{number}": leaf for number, leaf in _numbered(kernel, leaves)}


def leaf_sizes(kernel: Kernel, leaves: list[Tensor]) -> dict[str, int]:
    return {
        f"leaf{n}_n{dim}": size
        for n, leaf in _numbered(kernel, leaves)
        for dim, size in enumerate(leaf.shape)
    }


def _numbered(kernel: Kernel, leaves: list[Tensor]) -> list[tuple[int, Tensor]]:
    """The leaf tensors by the numbers that the site's expression gives them."""
    mod = kernel.spec.site.score.mod
    numbers = [] if mod is None else sorted(expression.tensors(mod).found)
    return list(zip(numbers, leaves, strict=True))


def slots_of(spec: KernelSpec, buffers: Sequence[Tensor]) -> int:
    """Slots of a sequence in dense buffers."""
    slots, layout = buffers[0].shape[2], spec.as_read
    every = layout.keys.parts(spec.head_dim, spec.torch_dtype)[0].every
    if every > 1:
        # A row of a group holds several slots, the last of them not all: the least count rounds to all others.
        slots = slots * every
        if not layout.in_keys:
            own = layout.values.parts(spec.v_head_dim, spec.torch_dtype)[0].every
            slots = torch.sym_min(slots, buffers[layout.num_key_parts].shape[2] * own)
    return slots


def new_sizes(new: list[Tensor]) -> dict[str, int]:
    """How long arrays of new tokens' codes are."""
    return {"new_16": new[0].shape[2] // 16} if new else {}


def sizes_of(
    kernel: Kernel, buffers: list[Tensor], bias: Tensor | None, rope: list[Tensor]
) -> dict[str, int]:
    spec, sizes = kernel.spec, dict[str, int]()
    if buffers:
        slots = slots_of(spec, buffers)
        sizes = {"slots": slots, "slots_16": slots // 16}
    if bias is not None:
        sizes["reach"] = bias.shape[-1]
    if rope:
        sizes["table_rows"] = rope[0].shape[0]
    return sizes
