"""Which backend compiles the rewritten graph (`compile.backend`), settled with the plan.

| `compile.backend` | where it can be | elsewhere |
|---|---|---|
| inductor | everywhere | - |
| torch_tensorrt | an NVIDIA GPU, where torch_tensorrt imports (`emit/torch_tensorrt.py`) | an error with the reason |
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcompile.emit import torch_tensorrt
from kvcompile.errors import PlanError
from kvcompile.plan import Plan


def with_backend(plan: Plan, backend: str, device: torch.device) -> Plan:
    """The plan with the backend that compiles it.

    Raises:
        PlanError: it cannot compile for `device`; says what to install.
    """
    if backend != "torch_tensorrt":
        return plan
    problem = torch_tensorrt.unavailable(device)
    if problem is not None:
        raise PlanError(
            f"recipe {plan.recipe!r} does not fit this model:\n  - compile.backend: torch_tensorrt: {problem}"
        )
    return replace(plan, backend="torch_tensorrt")
