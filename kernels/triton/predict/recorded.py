"""Which launches a call makes, with their grids and the sizes of their tensors: the code that launches, without memory.

As `host/launches.py`, which says what is compiled; this also says how often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.device import Device, acting_as
from kvcompile.kernels.triton.host.launch import Recorded, known, recording
from kvcompile.kernels.triton.host.launches import call, for_hardware
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tools.assemble import Request
from kvcompile.util.machines import Machine


@dataclass(frozen=True)
class Shape:
    """What a site is asked: attention of some sequences.

    heads, dims: of queries and keys; of keys and values
    lengths:     tokens of each sequence, the new ones among them
    tokens:      of those, new ones
    limit:       of a sequence's tokens, which splits follow from; None: the longest
    prefix:      tokens that all sequences begin with, on pages that they have in common (a step of one token)
    kept:        whether the L2 cache keeps these from one program to the next, and so memory gives them once
    """

    site: SiteSpec
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    lengths: tuple[int, ...]
    tokens: int = 1
    limit: int | None = None
    prefix: int = 0
    kept: bool = False


@dataclass(frozen=True)
class Made:
    """A launch. request: its kernel, and how it is compiled; grid: programs; bytes: of each tensor that it is given."""

    request: Request
    grid: tuple[int, ...]
    bytes: Mapping[str, int]
    sizes: Mapping[str, int | float]

    @property
    def spec(self) -> KernelSpec:
        return self.request.spec

    @property
    def programs(self) -> int:
        return math.prod(self.grid)


def recorded(shape: Shape, machine: Machine) -> tuple[Made, ...]:
    """The launches of one call, in their order."""
    device = Device(machine.name, machine.arch, machine.multiprocessors)
    limit = shape.limit or max(shape.lengths)
    with recording() as found, acting_as(device), FakeTensorMode():
        call(shape.site, shape.heads, shape.dims, shape.dtype, limit, len(shape.lengths), shape.tokens)
    return tuple(made_of(one, machine.arch) for one in found)


def made_of(one: Recorded, arch: int) -> Made:
    """A launch that was recorded, as it is compiled for `arch`."""
    spec = for_hardware(one.kernel.spec)
    request = Request(spec, arch, one.num_warps, one.num_stages, known(one.kernel, one.tensors))
    sizes = {name: tensor.nbytes for name, tensor in one.tensors.items()}
    return Made(request, tuple(int(number) for number in one.grid), sizes, dict(one.sizes))
