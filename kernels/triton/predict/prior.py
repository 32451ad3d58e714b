"""In which order a tuner tries candidates, by what is predicted of them, and which of them it leaves out.

What is predicted to be fastest comes first. Left out is what is predicted to take `HOPELESS` times as long as the best,
and what does not assemble or does not fit. What the tables say now is always measured, whatever is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcompile.errors import KernelError
from kvcompile.kernels.triton.config import Config, using
from kvcompile.kernels.triton.host.decoded_once import read_in_slots
from kvcompile.kernels.triton.predict.assumptions import HOPELESS
from kvcompile.kernels.triton.predict.facts import Progress, facts
from kvcompile.kernels.triton.predict.launch import predicted
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.recorded import Made, Shape, recorded
from kvcompile.kernels.triton.spec import Role


@dataclass(frozen=True)
class Ranked:
    """Candidates, the fastest first. seconds: predicted, the geometric mean over the shapes; none: it does not run"""

    seconds: Mapping[Config, float]
    without: tuple[Config, ...]

    @property
    def order(self) -> tuple[Config, ...]:
        return tuple(sorted(self.seconds, key=lambda one: self.seconds[one]))

    def hopeful(self, times: float = HOPELESS) -> tuple[Config, ...]:
        """Those to try, in their order: all that are predicted to take less than `times` the time of the best."""
        least = min(self.seconds.values(), default=0.0)
        return tuple(one for one in self.order if self.seconds[one] < times * least)


def ranked(
    role: Role,
    candidates: Iterable[Config],
    shapes: Sequence[Shape],
    model: Model,
    progress: Progress | None = None,
) -> Ranked:
    """What is predicted of candidates for a role, over all shapes; kernels that no cache has facts of are assembled."""
    made: dict[Config, tuple[tuple[Made, ...], ...]] = {}
    for candidate in candidates:
        with using(role, candidate), read_in_slots():  # as they are measured (`tools/tune.py`)
            made[candidate] = tuple(recorded(shape, model.machine) for shape in shapes)
    wanted = (one.request for calls in made.values() for launches in calls for one in launches)
    found = facts(wanted, progress)
    seconds: dict[Config, float] = {}
    without = []
    for candidate, calls in made.items():
        try:
            times = [
                sum(one.seconds for one in predicted(launches, shape, found, model))
                for shape, launches in zip(shapes, calls, strict=True)
            ]
        except KernelError:
            without.append(candidate)
        else:
            seconds[candidate] = math.exp(sum(map(math.log, times)) / len(times))
    return Ranked(seconds, tuple(without))
