"""Append and attend where C++ kernels run a site.

| new tokens | what runs |
|---|---|
| one | the generated kernel; what a selection chooses is the reference's choice |
| many | the reference, with the kernel's attention; of a retention by scores, all of it |
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvcompile.kernels.cpp.host import prefill
from kvcompile.kernels.cpp.host.attention import cached_attention_one
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.reference.selections import SELECT
from kvcompile.kernels.shared.rope import rotate, rotated_first


def cached_attention(x: AttendInputs) -> Tensor:
    """As `reference.cached_attention`.

    Raises:
        KernelError: the kernel cannot be compiled.
    """
    if x.q.shape[2] != 1:
        return reference.cached_attention(x, attend_many)
    selection = x.spec.layout.selection
    if not selection.selects:
        return cached_attention_one(x)
    q, k, rope = rotated_first(x.q, x.k, x.positions, x.rope, x.spec)
    # Turned already: the kernel turns nothing.
    spec = replace(x.spec, rotary=None) if x.spec.rotates_on_append else x.spec
    x = replace(x, q=q, k=k, rope=rope, spec=spec)
    return cached_attention_one(x, SELECT[selection.kind](x))


def attend_many(
    x: AttendInputs, k: Tensor, v: Tensor, key_positions: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """As the reference's."""
    if x.rope:
        q = rotate(x.q, x.positions, *x.rope, form=x.spec.rotary)
        k = rotate(k, key_positions, *x.rope, form=x.spec.rotary)
        x = replace(x, q=q, rope=[])
    return prefill.attend_many(x, k, v, key_positions, allowed)
