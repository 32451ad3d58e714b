"""`kvcompile::cached_attention`: the op that a rewritten graph has at each attention site.

Its schema says what it mutates; its body is the reference, into which torch.compile and make_fx see through
(CompositeImplicitAutograd), so Inductor fuses it with what stands around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels import reference
from kvcompile.kernels.spec import SiteSpec

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor(a!)[] buffers, Tensor positions, Tensor seq_lens, "
    "Tensor[] rope, SymInt span, str spec) -> Tensor"
)


def _cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    span: int,
    spec: str,
) -> Tensor:
    return reference.cached_attention(
        q, k, v, list(buffers), positions, seq_lens, list(rope), span, SiteSpec.from_json(spec)
    )


_LIB.impl("cached_attention", _cached_attention, "CompositeImplicitAutograd")
cached_attention = torch.ops.kvcompile.cached_attention.default
