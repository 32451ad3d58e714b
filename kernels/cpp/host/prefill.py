"""Attention of many new queries by a generated C++ kernel (`templates/prefill.cpp.jinja`)."""

from __future__ import annotations

from torch import Tensor

from kvcompile.kernels.cpp.attend.prefill import site_of
from kvcompile.kernels.cpp.host import ops
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.kernels.inputs import AttendInputs


def attend_many(
    x: AttendInputs, k: Tensor, v: Tensor, key_positions: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """As the reference's `attend_many`, of queries and keys that have been turned, and positions of the sequence.

    Queries that are padding give zeros.

    Raises:
        KernelError: the kernel cannot be compiled; a plan says before where there is no compiler (`available.py`).
    """
    ops.ready()
    q = x.q
    spec = CppSpec(
        "prefill",
        site_of(x.spec),
        q.shape[1],
        k.shape[1],
        q.shape[3],
        v.shape[3],
        str(q.dtype).removeprefix("torch."),
    )
    q, k, v = (own if own.stride(-1) == 1 else own.contiguous() for own in (q, k.to(q.dtype), v.to(q.dtype)))
    out: Tensor = ops.cpp_attend_many(
        q,
        k,
        v,
        key_positions[:, None],
        x.positions,
        None if x.sinks is None else x.sinks.float().contiguous(),
        None if x.bias is None else x.bias.float().contiguous(),
        allowed,
        spec.to_json(),
    )
    return out
