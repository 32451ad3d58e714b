"""The cache of the reference as tests write and read it alone, without attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import slots
from kvcompile.kernels.reference.retention import retained
from kvcompile.kernels.reference.slots import Stored
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout


def append(
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    layout: CacheLayout,
    page_table: Tensor | None = None,
) -> None:
    """Write tokens k [B, Hkv, S, D], v [B, Hkv, S, Dv] as a step does; see `append_residual`."""
    x = _call(k, v, buffers, positions, seq_lens, layout, page_table)
    hooks = retained(layout.retention)
    if k.shape[2] == 1 or layout.in_order:
        slots.write(x, hooks.slot(x))
    else:
        hooks.keep(x, slots.Stored([], [], positions), None)


def append_residual(
    k: Tensor, v: Tensor, buffers: list[Tensor], positions: Tensor, seq_lens: Tensor, layout: CacheLayout
) -> None:
    """Write what many tokens of slots in order leave until they have attended: the newest, unquantized."""
    slots.write_residual(_call(k, v, buffers, positions, seq_lens, layout))


def stored(
    buffers: list[Tensor],
    length: Tensor,
    span: int,
    layout: CacheLayout,
    page_table: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """K's parts, V's parts and the positions of their tokens, of sequences of `length` [B]."""
    none = torch.zeros(length.shape[0], 1, 1, 1, device=length.device)
    x = _call(none, none, buffers, length[:, None] - 1, length, layout, page_table, span)
    keys, values = slots.read(x)
    found = Stored(keys, values, retained(layout.retention).held(x, length))
    return found.keys, found.values, found.tokens


def _call(
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    layout: CacheLayout,
    page_table: Tensor | None = None,
    span: int = 0,
) -> AttendInputs:
    spec = SiteSpec(layout, 1.0)
    return AttendInputs(k, k, v, buffers, positions, seq_lens, [], span, spec, page_table=page_table)
