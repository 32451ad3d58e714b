"""Which backend compiles the rewritten graph (`compile.backend`), settled with the plan.

| `compile.backend` | where it can be | elsewhere |
|---|---|---|
| inductor | everywhere | - |
| torch_tensorrt | an NVIDIA GPU, where torch_tensorrt imports (`backends/torch_tensorrt.py`) | an error and why |
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch

from kvcompile.errors import PlanError
from kvcompile.plan import Plan

_SERIES = ".".join(torch.__version__.split(".")[:2])
_INSTALL = (
    f'pip install "torch-tensorrt=={_SERIES}.*" beside a CUDA build of torch {_SERIES} (with --extra-index-url '
    "https://pypi.nvidia.com for TensorRT itself), or use compile: {backend: inductor}"
)


def with_backend(plan: Plan, backend: str, device: torch.device | None) -> Plan:
    """The plan with the backend that compiles it; device None: not known (an estimate), so nothing is refused.

    Raises:
        PlanError: it cannot compile for `device`; says what to install.
    """
    if backend != "torch_tensorrt":
        return plan
    problem = None if device is None else unavailable(device)
    if problem is not None:
        raise PlanError(
            f"recipe {plan.recipe!r} does not fit this model:\n  - compile.backend: torch_tensorrt: {problem}"
        )
    return replace(plan, backend="torch_tensorrt")


def unavailable(device: torch.device) -> str | None:
    """Why torch_tensorrt cannot compile for `device`, and what to do instead; None: it can."""
    if device.type != "cuda":
        return (
            f"TensorRT runs on NVIDIA GPUs alone, and the model is on {device}: move it to a GPU before optimize, or "
            "use compile: {backend: inductor}"
        )
    try:
        importlib.import_module("torch_tensorrt")
    except ImportError as error:
        return f"torch_tensorrt is not installed ({error}): {_INSTALL}"
    except Exception as error:  # it raises what it likes where it does not fit torch, CUDA or TensorRT
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return (
            f"torch_tensorrt is installed and does not import ({type(error).__name__}: {reason}): {_INSTALL}"
        )
    return None
