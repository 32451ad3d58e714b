"""Which kernels run a site: generated Triton, or the reference, which Inductor compiles. Decided once, in the plan.

| `compile.kernels` | on an NVIDIA GPU | elsewhere |
|---|---|---|
| auto | triton where a site has kernels, else the reference, with the reason | reference |
| triton | triton, or an error with the reason | an error (but in Triton's interpreter) |
| reference | reference | reference |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvcompile.kernels.spec import Kernels, SiteSpec
from kvcompile.kernels.triton import available
from kvcompile.kernels.triton.supports import refusal

Wanted = Literal["auto", "triton", "reference"]


@dataclass(frozen=True)
class KernelChoice:
    """What runs a site, and why."""

    kernels: Kernels
    because: str


def choose(
    wanted: Wanted,
    site: SiteSpec,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | None,
) -> KernelChoice:
    """The kernels of a site; for heads, dims and dtype see `triton.supports.refusal`.

    Args:
        wanted: the recipe's `compile.kernels`.
        device: the model's; None where there is no model yet (an estimate): what a device decides is left open.

    Raises:
        ValueError: Triton kernels were asked for and there are none: the recipe's key, the reason and what to do.
    """
    if wanted == "reference":
        return KernelChoice("reference", "the recipe asks for the reference")
    if device is not None and wanted == "auto" and device.type != "cuda":
        return KernelChoice("reference", f"the model is on {device}")
    problem = refusal(site, heads, dims, dtype)
    if problem is None and device is not None:
        problem = available.problem(device)
    if problem is not None and wanted == "triton":
        raise ValueError(
            f"compile.kernels: triton cannot run this layer: {problem}; use kernels: auto or reference"
        )
    if problem is not None:
        return KernelChoice("reference", problem)
    if wanted == "triton":
        return KernelChoice("triton", "the recipe asks for Triton")
    if device is None:
        return KernelChoice("reference", "no device is known; on an NVIDIA GPU, Triton")
    return KernelChoice("triton", f"the model is on {device}")
