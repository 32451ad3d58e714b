"""What generated kernels can do, known at plan time: nothing is refused at a launch.

Each rule looks at one site, as its cache has it, and gives the reason or None. Roles that learn more take rules out.
"""

from __future__ import annotations

import torch

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
# What kernels have been written for. Whatever is added elsewhere is refused here until it is written here, too.
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
SMALLEST_DIM, LARGEST_DIM = 4, 576  # of keys: what a Hadamard rotation turns; MLA's latent and rotary rows


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
    if site.score.mod is not None and (problem := _unprinted(site)):
        return problem
    if not SMALLEST_DIM <= dims[0] <= LARGEST_DIM:
        return f"its keys have {dims[0]} channels, and kernels are for {SMALLEST_DIM} to {LARGEST_DIM}"
    if dims[1] > LARGEST_DIM:
        return f"its values have {dims[1]} channels, and kernels are for at most {LARGEST_DIM}"
    if site.rotary is not None and site.layout.rotates_on_read and site.layout.keys.hadamard:
        return "its keys are kept turned (rotate: hadamard) before RoPE, and kernels turn none back"
    return unsupported(site.layout, dtype)


def _unprinted(site: SiteSpec) -> str | None:
    """Why the expression of a site's scores is not printed, or None; the printer is loaded where there is one."""
    from kvcompile.kernels.triton.tile import expression

    assert site.score.mod is not None
    return expression.refusal(site.score.mod)


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
        group = kept.scale.size if kept.scale.per == "group" else 0
        if group & (group - 1):
            return (
                f"{name}: {kept} has groups of {group} channels, and a kernel's blocks are powers of two: use group "
                f"{1 << (group.bit_length() - 1)}, or 0 for the whole head"
            )
    return None
