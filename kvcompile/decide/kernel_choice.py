"""What runs a site: generated kernels, or the reference, which Inductor compiles. Decided once, in the plan.

| `compile.kernels` | on an NVIDIA GPU | on a CPU | elsewhere |
|---|---|---|---|
| auto | triton where a site has kernels, else the reference | cpp, likewise | reference |
| triton | triton, or an error with the reason | an error (but in Triton's interpreter) | an error |
| cpp | an error | cpp, or an error with the reason | an error |
| reference | reference | reference | reference |

`auto` asks no C++ compiler for anything where `compile: {mode: none}` says that nothing is to be compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvcompile.kernels.cpp import available as cpp_available
from kvcompile.kernels.cpp import supports as cpp_supports
from kvcompile.kernels.spec import Kernels, SiteSpec
from kvcompile.kernels.triton import available as triton_available
from kvcompile.kernels.triton import supports as triton_supports

Wanted = Literal["auto", "triton", "cpp", "reference"]
_FAMILIES = {"triton": (triton_supports, triton_available), "cpp": (cpp_supports, cpp_available)}
_OF_DEVICE: dict[str, Literal["triton", "cpp"]] = {"cuda": "triton", "cpu": "cpp"}
_TITLES = {"triton": "Triton", "cpp": "C++"}


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
    compiles: bool = True,
) -> KernelChoice:
    """The kernels of a site; for heads, dims and dtype see `supports.refusal` of either family.

    Args:
        wanted: the recipe's `compile.kernels`.
        device: the model's; None where there is no model yet (an estimate): what a device decides is left open.
        compiles: whether the recipe has anything compiled.

    Raises:
        ValueError: kernels were asked for and there are none: the recipe's key, the reason and what to do.
    """
    if wanted == "reference":
        return KernelChoice("reference", "the recipe asks for the reference")
    if wanted == "auto" and device is not None and device.type not in _OF_DEVICE:
        return KernelChoice("reference", f"the model is on {device}")
    family = _family(wanted, device)
    if wanted == "auto" and family == "cpp" and not compiles:
        return KernelChoice("reference", "nothing is compiled (compile.mode: none)")
    supports, available = _FAMILIES[family]
    problem = supports.refusal(site, heads, dims, dtype)
    if problem is None and device is not None:
        problem = available.problem(device)
    if problem is not None and wanted != "auto":
        raise ValueError(
            f"compile.kernels: {wanted} cannot run this layer: {problem}; use kernels: auto or reference"
        )
    if problem is not None:
        return KernelChoice("reference", problem)
    if wanted != "auto":
        return KernelChoice(family, f"the recipe asks for {_TITLES[family]}")
    if device is None:
        return KernelChoice("reference", "no device is known; on an NVIDIA GPU, Triton, and on a CPU, C++")
    said = "" if family == "triton" else f", compiled for {available.described(dtype)}"
    return KernelChoice(family, f"the model is on {device}{said}")


def refusal(
    kernels: Kernels, site: SiteSpec, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> str | None:
    """Why a family of kernels cannot run a site, or None; the reference runs all."""
    if kernels == "reference":
        return None
    problem: str | None = _FAMILIES[kernels][0].refusal(site, heads, dims, dtype)
    return problem


def _family(wanted: Wanted, device: torch.device | None) -> Literal["triton", "cpp"]:
    """The kernels that are asked for, or those of a device; where none is known, those that refuse the most."""
    if wanted in ("triton", "cpp"):
        return wanted
    return "triton" if device is None else _OF_DEVICE[device.type]
