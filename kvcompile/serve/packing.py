"""Whether an engine's steps are packed: one pass for all texts of a step, where it has chunks of prompts besides."""

from __future__ import annotations

from kvcompile.errors import InputError, PlanError
from kvcompile.recipe.serve import Switch
from kvcompile.runtime.module import CachedModel
from kvcompile.runtime.packed import refusal


def unpacked_because(wanted: Switch, module: CachedModel, deterministic: bool) -> str | None:
    """Why steps are not packed; None: they are.

    Args:
        wanted: "auto": where the module can and it pays; "on": or else refuse; "off".

    Raises:
        InputError: "on" with `deterministic`.
        PlanError: "on", and the module has no packed form.
    """
    if wanted == "off":
        return "asked for"
    if deterministic:
        reason = "deterministic: a chunk has its own bits only where it has a pass of its own"
        if wanted == "on":
            raise InputError(f"packed: on, and {reason}")
        return reason
    no_form = refusal(module.plan, module.program)
    if wanted == "on":
        if no_form is not None:
            raise PlanError(f"packed: on, and steps of this plan cannot be: {no_form}")
        return None
    return no_form or _does_not_pay(module)


def _does_not_pay(module: CachedModel) -> str | None:
    """Why packed steps are slower here than passes of their own, or None."""
    if module.device.type == "cpu":
        return "on a CPU, a chunk and a step for the others are faster each alone"
    slow = next((d.layer for d in module.plan.decisions if d.kernels != "triton"), None)
    if slow is not None:
        return f"layer {slow} has no generated kernels, and would ask the device for the lengths of its sequences"
    return None
