"""What generated kernels can do, known at plan time: nothing is refused at a launch.

Each rule looks at one site, as its cache has it, and gives the reason or None. Roles that learn more take rules out.
"""

from __future__ import annotations

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    Affine,
    CacheLayout,
    Contiguous,
    Float,
    Fp8,
    Full,
    InKeys,
    Int8,
    ModelDtype,
    Paged,
    PerChannel,
    Recent,
    Ring,
    Rotated,
    Scored,
    SinkWindow,
    Slots,
    Storage,
    Window,
)
from kvcompile.layouts.storage import as_kept

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What kernels have been written for. Whatever is added elsewhere is refused here until it is written here, too.
_STORAGES = (ModelDtype, Float, Fp8, Int8, Affine, PerChannel)
_PLACEMENTS = (Contiguous, Ring, Slots, Paged)
_RETENTIONS = (Full, Window, SinkWindow, Scored)
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
    if site.rotary is not None and site.layout.rotates_on_read and isinstance(site.layout.keys, Rotated):
        return "its keys are kept turned (rotate: hadamard) before RoPE, and kernels turn none back"
    return unsupported(site.layout, dtype)


def _unprinted(site: SiteSpec) -> str | None:
    """Why the expression of a site's scores is not printed, or None; the printer is loaded where there is one."""
    from kvcompile.kernels.triton import expression

    assert site.score.mod is not None
    return expression.refusal(site.score.mod)


def unsupported(layout: CacheLayout, dtype: torch.dtype) -> str | None:
    """Why no kernel writes or reads vectors of a model in `dtype` in this layout, or None."""
    if dtype not in _DTYPES:
        return f"the generated kernels take models in float32, float16 or bfloat16, not in {dtype}"
    for axis, chosen, written in (
        ("placement", layout.placement, _PLACEMENTS),
        ("retention", layout.retention, _RETENTIONS),
    ):
        if type(chosen) not in written:
            return f"no kernels are written for {axis} '{chosen}'"
    sides = {"keys": layout.keys} if isinstance(layout.values, InKeys) else _sides(layout)
    for name, storage in sides.items():
        kept = as_kept(storage)
        kept = kept.inner if isinstance(kept, Recent) else kept
        if type(kept) not in _STORAGES:
            return f"no kernels are written for {name} in '{kept}'"
        group = kept.group if isinstance(kept, Affine) else 0
        if group & (group - 1):
            return (
                f"{name}: {kept} has groups of {group} channels, and a kernel's blocks are powers of two: use group "
                f"{1 << (group.bit_length() - 1)}, or 0 for the whole head"
            )
    return None


def _sides(layout: CacheLayout) -> dict[str, Storage]:
    return {"keys": layout.keys, "values": layout.values}
