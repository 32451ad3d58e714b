"""What generated C++ kernels can do, known at plan time: nothing is refused at a call.

Each rule looks at one site, as its cache has it, and gives the reason or None. Whatever is added elsewhere is refused
here until it is written here, too.
"""

from __future__ import annotations

import torch

from kvcompile.expression import ScoreMod
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    AllTokens,
    CacheLayout,
    Contiguous,
    Full,
    InKeys,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    TopPages,
    Window,
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CODES = {
    "model": {"none"},
    "float32": {"none"},
    "float16": {"none"},
    "bfloat16": {"none"},
    "e4m3": {"none", "vector", "head", "tensor"},
    "e5m2": {"none", "vector", "head", "tensor"},
    "int8": {"vector"},
    **{f"uint{bits}": {"group", "channel"} for bits in (2, 3, 4, 8)},
    "nf4": {"group"},
    "e2m1": {"group"},
}
_PLACEMENTS = (Contiguous, Ring, Slots, Paged)
_RETENTIONS = (Full, Window, SinkWindow, Scored)
_SELECTIONS = (AllTokens, TopPages)
LARGEST_DIM = 576  # of keys and values: what a worker's stack is sure to hold
LARGEST_GROUP = 128  # query heads of a KV head, likewise
LARGEST_BUDGET = 1 << 15  # slots whose order is told on a worker's stack


def refusal(
    site: SiteSpec,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> str | None:
    """Why there are no kernels for a site, or None.

    Args:
        heads: query heads and KV heads.
        dims: channels of a key and of a value.
        dtype: the model's.
    """
    if site.score.mod is not None and (problem := _unprinted(site.score.mod)):
        return problem
    if max(dims) > LARGEST_DIM:
        return f"its keys or values have {max(dims)} channels, and kernels are for at most {LARGEST_DIM}"
    if heads[0] // heads[1] > LARGEST_GROUP:
        return (
            f"{heads[0] // heads[1]} query heads share a KV head, and kernels are for at most {LARGEST_GROUP}"
        )
    return unsupported(site.layout, dtype)


def _unprinted(mod: ScoreMod) -> str | None:
    """Why the expression of a site's scores is not printed, or None; the printer is loaded where there is one."""
    from kvcompile.kernels.cpp.attend import expression

    return expression.refusal(mod)


def unsupported(layout: CacheLayout, dtype: torch.dtype) -> str | None:
    """Why no kernel writes or reads vectors of a model in `dtype` in this layout, or None."""
    if dtype not in _DTYPES:
        return f"the generated kernels take models in float32, float16 or bfloat16, not in {dtype}"
    for axis, chosen, written in (
        ("placement", layout.placement, _PLACEMENTS),
        ("retention", layout.retention, _RETENTIONS),
        ("selection", layout.selection, _SELECTIONS),
    ):
        if type(chosen) not in written:
            return f"no kernels are written for {axis} '{chosen}'"
    for name, storage in (("keys", layout.keys), ("values", layout.values)):
        if isinstance(storage, InKeys):
            continue
        kept = storage.of_slots
        if kept.scale.per not in _CODES.get(kept.code, ()):
            return f"no kernels are written for {name} in '{kept}'"
    retention = layout.retention
    if isinstance(retention, Scored) and retention.in_cache and retention.tokens > LARGEST_BUDGET:
        return f"its retention keeps {retention.tokens:,} tokens in an order, and kernels are for {LARGEST_BUDGET:,}"
    return None
