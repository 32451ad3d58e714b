"""Which machine compiled code runs on: an AOTInductor package has machine code of one system and architecture, of the
instruction sets of the CPU (or the compute capability of the GPU) that it was compiled for.

| key | what |
|---|---|
| device | cpu or cuda |
| system, machine | as `sys.platform` and `platform.machine()` name them |
| cpu | instruction sets, as `torch.cpu.get_capabilities()` names them: all of them must be there |
| compute_capability | of the GPU, [major, minor]: the same major, at least the minor (NVIDIA's rule for cubins) |
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from typing import Any

import torch

# What compilers use without being asked: vectors, and what counts and moves bits. (AMX is asked for by Inductor.)
_USED = (
    "sse",
    "avx",
    "amx",
    "fma",
    "f16c",
    "bmi",
    "lzcnt",
    "popcnt",
    "neon",
    "sve",
    "bf16",
    "i8mm",
    "dot",
    "fp16",
)


def has() -> set[str]:
    """The instruction sets of this machine's CPU that compiled code may use."""
    found = {name for name, there in torch.cpu.get_capabilities().items() if there is True}
    return {name for name in found if name.startswith(_USED)} - {
        "sse4a"
    }  # of AMD alone, and used by no compiler


def needs(device: torch.device, cpu: Iterable[str]) -> dict[str, Any]:
    """What the manifest says of code that was compiled here for `device`, with the instruction sets `cpu`."""
    found: dict[str, Any] = {
        "device": device.type,
        "system": sys.platform,
        "machine": platform.machine(),
        "cpu": sorted(cpu),
    }
    if device.type == "cuda":
        found["compute_capability"] = list(torch.cuda.get_device_capability(device))
    return found


def problem(needed: dict[str, Any]) -> str | None:
    """Why this machine cannot run code that needs that; None if it can."""
    here = (sys.platform, platform.machine())
    there = (needed.get("system"), needed.get("machine"))
    if here != there:
        return f"it is compiled for {there[0]} on {there[1]}, and this is {here[0]} on {here[1]}"
    missing = sorted(set(needed.get("cpu", ())) - has())
    if missing:
        return (
            f"it is compiled for a CPU with {', '.join(missing)}, which this one lacks; export it here, or there with "
            "options={'cpu': 'x86-64-v3'}, which every CPU with AVX2 runs"
        )
    if needed.get("device") != "cuda":
        return None
    if not torch.cuda.is_available():
        return "it is compiled for an NVIDIA GPU, and there is none here; export the model from the CPU"
    wanted, own = tuple(needed["compute_capability"]), torch.cuda.get_device_capability()
    if own[0] != wanted[0] or own < wanted:
        return (
            f"it is compiled for compute capability {wanted[0]}.{wanted[1]}, and this GPU has {own[0]}.{own[1]}; "
            "export it on this GPU"
        )
    return None
