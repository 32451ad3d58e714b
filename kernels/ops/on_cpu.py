"""Append and attend where C++ kernels run a site.

| new tokens | what runs |
|---|---|
| one | the generated kernel; what a selection chooses is the reference's choice |
| many | the reference, with the kernel's attention, and its sums of probabilities where a retention needs them |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.kernels.cpp.host import prefill
from kvcompile.kernels.cpp.host.attention import cached_attention_one
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.packed import PackedInputs, in_parts
from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.reference.retention.hooks import Attends
from kvcompile.kernels.reference.selections import SELECT
from kvcompile.kernels.shared.rope import rotate, rotated_first
from kvcompile.kernels.spec import SiteSpec


def cached_attention(x: AttendInputs) -> Tensor:
    """As `reference.cached_attention`.

    Raises:
        KernelError: the kernel cannot be compiled.
    """
    if x.q.shape[2] != 1:
        return reference.cached_attention(x, Attends(attend_many, attend_many, attend_columns))
    selection = x.spec.layout.selection
    if not selection.selects:
        return cached_attention_one(x)
    q, k, rope = rotated_first(x.q, x.k, x.positions, x.rope, x.spec)
    # Turned already: the kernel turns nothing.
    spec = replace(x.spec, rotary=None) if x.spec.rotates_on_append else x.spec
    x = replace(x, q=q, k=k, rope=rope, spec=spec)
    return cached_attention_one(x, SELECT[selection.kind](x))


def cached_attention_packed(x: PackedInputs) -> Tensor:
    """As `cached_attention`, of several sequences in one row: one call for those that decode, one for each other.

    Raises:
        KernelError: the kernel cannot be compiled.
        ValueError: the numbers of `x` do not fit each other.
    """
    return in_parts(x, cached_attention)


def attend_many(
    x: AttendInputs, k: Tensor, v: Tensor, key_positions: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """As the reference's."""
    near = None
    if x.rope:
        retention, form = x.spec.layout.retention, x.spec.rotary
        at, places = x.positions, key_positions
        if retention.in_cache:
            # First tokens have their distances from another place than the rest (`reference/retention/in_cache.py`).
            assert retention.window is not None
            budget = retention.sinks + retention.window
            base = (x.seq_lens - budget).clamp(min=0)[:, None]
            near = rotate(x.q, at.clamp(max=budget - 1), *x.rope, form=form)
            at, places = at - base, torch.where(places < retention.sinks, places, places - base)
        q, k = rotate(x.q, at, *x.rope, form=form), rotate(k, places, *x.rope, form=form)
        x = replace(x, q=q, rope=[])
    return prefill.attend_many(x, k, v, key_positions, allowed, near)


def attend_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    positions: Tensor,
    query_place: Tensor,
    key_place: Tensor,
    spec: str,
    forms: Sequence[int],
    *,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    site = SiteSpec.from_json(spec)
    return prefill.attend_columns(
        q,
        k,
        v,
        tokens,
        positions,
        query_place,
        key_place,
        site,
        forms,
        sinks=sinks,
        bias=bias,
        leaves=leaves,
    )
