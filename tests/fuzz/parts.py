"""An ingredient as data, the rule behind it, and the numbers that all rooms draw from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Part:
    """An ingredient by its name in its room, with its numbers and expressions."""

    name: str
    args: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"Part({self.name!r}, {self.args!r})" if self.args else f"Part({self.name!r})"


NONE = Part("none")


def nothing(rng: Random) -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True)
class Rule:
    """What an ingredient does.

    make:   the room says with which arguments; the part's own come last
    draw:   the part's arguments
    weight: how often, against the others of its room
    held:   True: a cache can hold it exactly, so a refusal is not true; False: it must be refused; None: either
    """

    make: Callable[..., Any]
    draw: Callable[[Random], tuple[Any, ...]] = nothing
    weight: float = 1.0
    held: bool | None = True


Room = Mapping[str, Rule]


def pick(rng: Random, room: Room, held: bool | None = None) -> Part:
    """One part of a room. held=True: of those that a cache can hold."""
    names = [name for name, rule in room.items() if held is None or rule.held is held] or list(room)
    name = rng.choices(names, [room[name].weight for name in names])[0]
    return Part(name, room[name].draw(rng))


SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
MIDDLE = (24, 29, 30, 31, 32, 33, 40, 48, 60, 64, 65, 67, 68, 80, 96, 99, 100, 127, 128, 129)
LARGE = (150, 160, 200, 240, 255, 256, 257, 300, 320, 400, 500, 512, 600)
HUGE = (700, 1000, 1023, 1024, 2047, 2048, 3000, 4095, 4096)


def number(rng: Random) -> int:
    """From 1 to 4,096, most often where a text of some hundred tokens shows it and a short probe does not."""
    return rng.choice(rng.choices((SMALL, MIDDLE, LARGE, HUGE), (3, 5, 4, 1))[0])


def far(rng: Random) -> int:
    """Beyond what a short probe sees, within the text."""
    return rng.choice(MIDDLE[9:] + LARGE[:8])


def spelled(rng: Random, value: int) -> str:
    """A constant as people write it: a literal most often, else some tensor with one number in it."""
    ways = ("{}", "c.buf({})", "c.one({})", "c.heads({})", "torch.tensor({})", "c.attr({})", "({} + 0.0)")
    return rng.choices(ways, (10, 2, 2, 1, 1, 1, 1))[0].format(value)
