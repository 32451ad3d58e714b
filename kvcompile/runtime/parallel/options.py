"""What `parallel=` of `kvcompile.optimize` says: over how many ranks and stages, and how long they wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcompile.errors import PlanError


@dataclass(frozen=True)
class Parallel:
    """Ranks of one model.

    tensor:  ranks that each have a part of the heads and of the weights; 1: none
    stages:  stages that each have a part of the layers, on `tensor` ranks each; 1: all layers are on every rank
    timeout: seconds after which a rank that does not answer is an error
    start:   the same at the start, while another rank may still load or verify
    """

    tensor: int = 1
    stages: int = 1
    timeout: float = 60.0
    start: float = 1800.0

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.tensor * self.stages

    def __str__(self) -> str:
        return ", ".join(
            f"{name}: {getattr(self, name)}" for name in ("tensor", "stages") if getattr(self, name) > 1
        )

    @staticmethod
    def of(given: object) -> Parallel:
        """From a mapping such as {"tensor": 2}, a `Parallel`, or None.

        Raises:
            PlanError: unknown keys or impossible values, all of them told.
        """
        if given is None:
            return Parallel()
        if isinstance(given, Parallel):
            return given
        if not isinstance(given, Mapping):
            raise PlanError(f'parallel: expected a mapping such as {{"tensor": 2}}, got {given!r}')
        known = [of.name for of in fields(Parallel)]
        problems = [f"{key!r} is not known; known: {', '.join(known)}" for key in given if key not in known]
        for name, what in (("tensor", "ranks"), ("stages", "stages")):
            count: Any = given.get(name, 1)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                problems.append(f"{name}: expected a number of {what} of at least 1, got {count!r}")
        for name in ("timeout", "start"):
            value: Any = given.get(name, 1.0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                problems.append(f"{name}: expected seconds, got {value!r}")
        if problems:
            raise PlanError("parallel: " + "; ".join(problems))
        return Parallel(**given)
