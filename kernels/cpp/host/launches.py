"""Which kernels a site runs, for a token and for a prompt, without running it: `kernels/ops/on_cpu.py` in names."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcompile.kernels.cpp.host import prefill
from kvcompile.kernels.cpp.host.attention import spec_of
from kvcompile.kernels.cpp.host.source import linear_spec
from kvcompile.kernels.cpp.isa import Isa, multiplies_rows, widens
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import InKeys


@dataclass(frozen=True)
class Launch:
    """One kernel. role: of attention, or "linear"; spec: as ops carry it; options: of a CppSpec"""

    when: str
    role: str
    spec: str
    options: tuple[str, ...] = ()


def launches(
    site: SiteSpec, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, own: Isa
) -> tuple[Launch, ...]:
    """Those of a layer whose layout has kernels (`supports.refusal` says None), and of its linear layers.

    Args:
        heads: query heads and KV heads. dims: channels of a key and of a value.
    """
    layout = site.layout
    v_dim = layout.values.channels if isinstance(layout.values, InKeys) else dims[1]
    chosen = layout.selection.selects
    # A selection is the reference's, which has turned the queries that it looks with.
    decode = replace(site, kernels="cpp", rotary=None if chosen and site.rotates_on_append else site.rotary)
    one = spec_of(decode, heads, (dims[0], v_dim), str(dtype), chosen, widens(dtype, own))
    found = [
        Launch("a token", "decode", one.to_json(), one.options),
        Launch("a token", "linear", linear_spec(dtype)),
    ]
    many = prefill.spec_of(site, (*heads, dims[0], v_dim), dtype, site.layout.retention.by_score, own)
    found.append(Launch("a prompt", "prefill", many.to_json(), many.options))
    if multiplies_rows(dtype, own):
        found.append(Launch("a prompt", "linear", linear_spec(dtype, True, own)))
    return tuple(found)
