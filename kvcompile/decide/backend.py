"""Which backend compiles the rewritten graph (`compile.backend`): Inductor, or an optional one that is installed.

An optional backend is a module that an installed package enters into the entry point group `kvcompile.backends`, under
the name that recipes give it:

    [project.entry-points."kvcompile.backends"]
    torch_tensorrt = "kvcompile.backends.torch_tensorrt"

It is imported when a plan asks for it, and nothing of kvcompile knows it otherwise. `Backend` says what it has to have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any, Protocol, cast

import torch
from torch.fx import GraphModule

from kvcompile.errors import PlanError
from kvcompile.plan import INDUCTOR, Plan
from kvcompile.recipe import Recipe

GROUP = "kvcompile.backends"


class Backend(Protocol):
    """The functions of a backend's module."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot compile for `device`, and what to do instead; None: it can."""

    def describe(self) -> str:
        """What compiles what, for `explain`; a line for each."""

    def compiler(self, plan: Plan, recipe: Recipe) -> Callable[[GraphModule, Sequence[Any], Any], Any]:
        """What compiles one region (`RegionCompiler` in `kvcompile/compile/executor.py`).

        An attention site is a region of its own: it writes the cache in place, and what lies between sites does not.
        """


def installed() -> tuple[str, ...]:
    """The names that `compile.backend` may have here."""
    return (INDUCTOR, *sorted({point.name for point in metadata.entry_points(group=GROUP)} - {INDUCTOR}))


def load(name: str) -> Backend:
    """An optional backend by its name.

    Raises:
        PlanError: there is none, or several, of that name, it cannot be imported, or it lacks a function.
    """
    point = _entry_point(name)
    try:
        found = point.load()
    except Exception as error:  # a package of anybody's
        reason = (str(error).splitlines() or [""])[0]
        raise _refused(name, f"{_told(point)} does not load: {type(error).__name__}: {reason}") from error
    wanted = [own for own in vars(Backend) if not own.startswith("_")]
    missing = [own for own in wanted if not callable(getattr(found, own, None))]
    if missing:
        raise _refused(name, f"{_told(point)} is no backend: it has no {', '.join(missing)}()")
    return cast(Backend, found)


def with_backend(plan: Plan, backend: str, device: torch.device | None) -> Plan:
    """The plan with the backend that compiles it; device None: not known (an estimate), so its word is not asked for.

    Raises:
        PlanError: it is not installed or does not load, or it cannot compile for `device`; says what to do.
    """
    if backend == INDUCTOR:
        return plan
    if device is None:
        _entry_point(backend)
        return replace(plan, backend=backend)
    loaded = load(backend)
    problem = loaded.unavailable(device)
    if plan.devices:
        problem = f"it compiles for one device, and the model is on {', '.join(plan.devices)}; use {INDUCTOR}"
    if problem is not None:
        raise PlanError(
            f"recipe {plan.recipe!r} does not fit this model:\n  - compile.backend: {backend}: {problem}"
        )
    return replace(plan, backend=backend, backend_because=loaded.describe())


def _entry_point(name: str) -> metadata.EntryPoint:
    points = [point for point in metadata.entry_points(group=GROUP) if point.name == name]
    if not points:
        raise _refused(name, "no installed package has a backend of this name")
    if len({point.value for point in points}) > 1:
        raise _refused(name, f"several packages have one of this name: {', '.join(map(_told, points))}")
    return points[0]


def _refused(name: str, problem: str) -> PlanError:
    return PlanError(f"compile.backend: {name}: {problem}; installed are {', '.join(installed())}")


def _told(point: metadata.EntryPoint) -> str:
    """An entry point with the package that has it."""
    of = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
    return f"{point.value}{of}"
