"""Whether generated kernels can run: what must be there besides a layout that they have (`supports.py`).

| device | runs where |
|---|---|
| cuda | Triton can be imported, and the GPU is an NVIDIA one of compute capability 8.0 or later |
| cpu | TRITON_INTERPRET=1 was set before Triton was first imported: its interpreter runs them, slowly, for tests |
"""

from __future__ import annotations

import importlib

import torch

from kvcompile.kernels.triton.device import Fp8Form, device_of, fp8_of, interpreted

__all__ = ["OLDEST", "fp8_form", "interpreted", "problem"]

OLDEST = (8, 0)  # the first with bfloat16 products and asynchronous copies


def problem(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of `device`, and what to do; None where they can."""
    if device.type not in ("cuda", "cpu"):
        return f"Triton kernels are for NVIDIA GPUs, and this model is on {device}"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return (
            f"Triton cannot be imported ({error}); install the triton package that this torch was built for"
        )
    if device.type == "cpu":
        if interpreted():
            return None
        return (
            f"Triton kernels are for NVIDIA GPUs, and this model is on {device} (TRITON_INTERPRET=1 in the environment "
            "set before Triton is imported, runs them in its interpreter, for tests)"
        )
    if torch.version.hip is not None:
        return "Triton kernels are generated for NVIDIA GPUs, and this torch is built for AMD's"
    if interpreted():
        return None
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        wanted, has = (".".join(map(str, version)) for version in (OLDEST, found))
        return f"Triton kernels need compute capability {wanted} or later, and {device} has {has}"
    return None


def fp8_form(device: torch.device) -> Fp8Form:
    """Whether kernels on `device` convert fp8 by its own instructions, or take the bytes apart themselves."""
    return fp8_of(device_of(device).arch)
