"""Programs over the places of multiprocessors: the last wave, unequal lengths, and what each stretch of time goes to.

A grid's programs are dealt out one to a multiprocessor, round by round, until all places are taken; a place that
becomes free takes the next one. A program starts (its addresses, its queries, the first tile), makes its turns as fast
as those beside it let it (`turn.py`), and ends. Between two such events nothing changes, so time goes from one to the
next; that is a fluid simulation, exact for its rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.turn import Turn, rate

_SAME = 1e-9  # events that are so near to each other are one: rounding
_INSTANT = 1e-12  # seconds that a start takes at least
_STARTS, _TURNS, _ENDS, _FREE = range(4)


@dataclass(frozen=True)
class Spent:
    """seconds: from the first program to the last; on: what they went to ("start", "tail", or a limit) -> seconds"""

    seconds: float
    on: dict[str, float]


def spent(
    programs: Sequence[float], turn: Turn, start: float, end: float, places: int, model: Model
) -> Spent:
    """programs: turns of each, in the order of the grid; start, end: seconds; places: of a multiprocessor"""
    own = _Places(programs, max(start, _INSTANT), end, places, model.machine.multiprocessors)
    on: dict[str, float] = {}
    while len(own.phase):
        label = "start"
        speed = np.ones(len(own.phase))
        turning = own.phase == _TURNS
        active = int(turning.sum())
        if active:
            beside = np.bincount(own.where[turning])
            found = {
                int(count): rate(turn, int(count), active, model) for count in np.unique(beside[beside > 0])
            }
            most = beside[own.where[turning]]
            for count, one in found.items():
                speed[turning] = np.where(most == count, one.turns, speed[turning])
            label = found[int(np.bincount(most).argmax())].limit
            if label != "memory" and not own.waiting and 2 * active < own.held:
                label = "tail"
        on[label] = on.get(label, 0.0) + own.advance(speed)
    return Spent(sum(on.values()), on)


class _Places:
    """Programs on places. phase: of each place; need: seconds or turns until its end; turns: of its program"""

    def __init__(
        self, programs: Sequence[float], start: float, end: float, places: int, multiprocessors: int
    ):
        self.turns = np.array(programs[: places * multiprocessors], dtype=float)
        self.held = len(self.turns)
        self.waiting = list(programs[self.held :])[::-1]
        self.start, self.end = start, end
        self.where = np.arange(self.held) % multiprocessors
        self.phase = np.full(self.held, _STARTS)
        self.need = np.full(self.held, start)

    def advance(self, speed: np.ndarray) -> float:
        """To the next event; returns the seconds until then."""
        times = self.need / speed
        step = float(times.min())
        self.need = self.need - step * speed
        for place in np.flatnonzero(times <= step * (1 + _SAME)):
            self._next(int(place))
        stay = self.phase != _FREE
        if not stay.all():
            self.where, self.phase, self.need, self.turns = (
                one[stay] for one in (self.where, self.phase, self.need, self.turns)
            )
        return step

    def _next(self, place: int) -> None:
        if self.phase[place] == _STARTS and self.turns[place] > 0:
            self.phase[place], self.need[place] = _TURNS, self.turns[place]
        elif self.phase[place] != _ENDS and self.end > 0:
            self.phase[place], self.need[place] = _ENDS, self.end
        elif self.waiting:
            self.turns[place] = self.waiting.pop()
            self.phase[place], self.need[place] = _STARTS, self.start
        else:
            self.phase[place] = _FREE
