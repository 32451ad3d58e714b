"""Linear layers of one token, as launches of role linear: their form, their grids and the sizes of their tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcompile.kernels.triton.device import Device, acting_as
from kvcompile.kernels.triton.host import ops_linear
from kvcompile.kernels.triton.host.launch import recording
from kvcompile.kernels.triton.host.linear import form, norm_in
from kvcompile.kernels.triton.predict.facts import Facts, assembled
from kvcompile.kernels.triton.predict.launch import Predicted, one_launch
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.recorded import Made, made_of
from kvcompile.kernels.triton.predict.work import linear
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.util.machines import Machine

_EPS = 1e-5  # any


@dataclass(frozen=True)
class Layers:
    """Layers of one x, in one launch.

    columns: channels of x; rows: results of each layer; of a gate and what it opens, both
    activation: of a gate, which is the first of two; None: each layer has results of its own
    normed: whether x is normed by who reads it; how: the norm, as a graph says it (`compile/norm_forms.py`)
    added: whether results are added to others
    """

    name: str
    columns: int
    rows: tuple[int, ...]
    activation: str | None = None
    dtype: torch.dtype = torch.bfloat16
    normed: bool = False
    added: bool = False
    how: str = ""

    @property
    def weight_bytes(self) -> int:
        return sum(self.rows) * self.columns * self.dtype.itemsize


@dataclass(frozen=True)
class Form:
    """How layers are cut up. rows: of a program; block: columns that its threads read with one load each"""

    rows: int
    block: int
    warps: int


def form_of(of: Layers, device: Device) -> tuple[KernelSpec, int]:
    """The kernel that the host takes, and its warps."""
    results = of.rows[:1] if of.activation else of.rows
    norm = norm_in(of.how, _EPS, ()).form if of.normed else None
    how = {"activation": of.activation, "norm": norm, "added": int(of.added)}
    return form(of.columns, results, len(of.rows), of.dtype, device, **how)  # type: ignore[arg-type]


def recorded(of: Layers, machine: Machine, instead: Form | None = None) -> Made:
    """The launch of layers. instead: of the form that the host takes"""
    device = Device(machine.name, machine.arch, machine.multiprocessors)
    with recording() as found, acting_as(device), FakeTensorMode():
        spec, warps = form_of(of, device)
        if instead is not None:
            spec, warps = replace(spec, block_m=instead.rows, block_n=instead.block), instead.warps
        weights = [torch.empty(count, of.columns, dtype=of.dtype) for count in of.rows]
        x = torch.empty(of.columns, dtype=of.dtype)
        residuals = [torch.empty(of.rows[0], dtype=of.dtype)] if of.added else []
        norm = [torch.empty_like(x) for _ in norm_in(of.how, _EPS, ()).form.tensors] if of.normed else []
        ops_linear.linear(x, weights, [], norm, residuals, warps, spec.to_json())
    (one,) = found
    return made_of(one, machine.arch)


def predicted(made: Made, found: Facts, model: Model) -> Predicted:
    """What a launch of role linear is predicted to take; raises as `launch.predicted`."""
    return one_launch(made, assembled(found, made.request), linear(made), model)
