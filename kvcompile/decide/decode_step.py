"""How a decode step runs: region by region, or as one CUDA graph (`kvcompile/compile/cudagraph.py`).

| `compile.mode` | on an NVIDIA GPU | elsewhere |
|---|---|---|
| default, none | regions | regions |
| cudagraphs | one graph, or an error with the reason | an error |
| max-autotune | one graph where that can be, else regions, with the reason | regions |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvcompile.errors import PlanError
from kvcompile.plan import Plan


def with_step(plan: Plan, mode: str, device: torch.device | None, python: Sequence[str]) -> Plan:
    """The plan with how its decode steps run.

    Args:
        mode: the recipe's `compile.mode`.
        device: the model's; None where it is not known (an estimate): the step is left as it is.
        python: paths of the modules that run as Python.

    Raises:
        PlanError: `cudagraphs` cannot be.
    """
    if mode not in ("cudagraphs", "max-autotune") or device is None:
        return plan
    problem = None
    if plan.devices:
        problem = f"a CUDA graph is one device's, and the model is on {', '.join(plan.devices)}"
    elif device.type != "cuda":
        problem = f"a CUDA graph needs an NVIDIA GPU, and the model is on {device}"
    elif python:
        others = "" if len(python) == 1 else f" and {len(python) - 1} more"
        problem = (
            f"{python[0]}{others} run{'s' if not others else ''} as Python, which a CUDA graph cannot hold"
        )
    if problem is not None and mode == "cudagraphs":
        raise PlanError(
            f"recipe {plan.recipe!r} does not fit this model:\n"
            f"  - compile.mode: cudagraphs: {problem}; use mode: default or max-autotune"
        )
    if problem is not None:
        return replace(plan, step_because=problem)
    return replace(plan, step="cudagraph", step_because=f"mode {mode}")
