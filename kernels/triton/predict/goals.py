"""What generated kernels shall reach: figures of cases, and what is made of them. Benchmarks judge by the same goals.

A goal is made of the figures of one run, so that none compares figures of different minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """What one run gave for a case. us: median microseconds of a call; share: of the measured copy bandwidth."""

    us: float
    bytes: int
    share: float


Figures = Mapping[str, Figure]


@dataclass(frozen=True)
class Goal:
    """number: of the list in docs/benchmarks.md; value: of the figures by case; wanted: at least that, or `at_most`"""

    number: int
    text: str
    wanted: float
    value: Callable[[Figures], float]
    at_most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.wanted if self.at_most else value >= self.wanted

    @property
    def sign(self) -> str:
        return "at most" if self.at_most else "at least"


def _over(one: str, other: str) -> Callable[[Figures], float]:
    return lambda figures: figures[one].us / figures[other].us


def _worst(names: tuple[str, ...], other: str) -> Callable[[Figures], float]:
    return lambda figures: max(figures[name].us for name in names) / figures[other].us


def _share(name: str) -> Callable[[Figures], float]:
    return lambda figures: figures[name].share


_PLAIN = "bf16 B32 4k"
_STEP = "Llama-3.1-8B bf16 B1"
GOALS = (
    Goal(1, "bf16 B32 4k: share of copy bandwidth", 0.92, _share(_PLAIN)),
    Goal(2, "bf16 B1 32k: microseconds", 39.0, lambda figures: figures["bf16 B1 32k"].us, at_most=True),
    Goal(3, "fp8 B1 256k 32/4: share of copy bandwidth", 0.80, _share("fp8 B1 256k 32/4")),
    Goal(4, "bf16 over int8, B32 4k", 1.75, _over(_PLAIN, "int8 B32 4k")),
    Goal(5, "bf16 over int4, B32 32k", 2.8, _over("bf16 B32 32k", "int4 B32 32k")),
    Goal(
        6,
        "softcap, window, ALiBi, sinks over plain, the worst",
        1.03,
        _worst(tuple(f"{_PLAIN} {what}" for what in ("softcap", "alibi", "sinks", "window")), _PLAIN),
        at_most=True,
    ),
    Goal(
        6,
        "pages of 16 over pages of 128",
        1.10,
        _over(f"{_PLAIN} pages of 16", f"{_PLAIN} pages of 128"),
        at_most=True,
    ),
    Goal(
        7,
        "scores tracked (H2O) over not",
        1.08,
        _over("bf16 B16 8k slots h2o", "bf16 B16 8k slots"),
        at_most=True,
    ),
    Goal(8, "ragged 1k-64k B64: share of copy bandwidth", 0.85, _share("bf16 B64 1k-64k pages of 64")),
    Goal(
        8,
        "one of 64k among 63 of 1k: share of copy bandwidth",
        0.85,
        _share("bf16 B64 one of 64k among 1k pages of 64"),
    ),
    Goal(
        9,
        "RoPE, int8 and append, microseconds, the worst of B1 to B256",
        5.0,
        lambda figures: max(figures[f"append int8 B{batch}"].us for batch in (1, 32, 256)),
        at_most=True,
    ),
    # Whole steps: benchmarks of decode measure them (`gpu_day_decode.py`), those of kernels leave them out.
    Goal(10, f"{_STEP} 1k, a token: share of copy bandwidth", 0.80, _share(f"{_STEP} 1k")),
    Goal(10, f"{_STEP} 32k, a token: share of copy bandwidth", 0.80, _share(f"{_STEP} 32k")),
)


@dataclass(frozen=True)
class Judged:
    """A goal by predictions. value: as expected; kind, harsh: where all assumptions are at one end or the other

    verdict: "met" or "missed" where all three say so, else "open"
    """

    goal: Goal
    value: float
    kind: float
    harsh: float

    @property
    def verdict(self) -> str:
        met = {self.goal.met(value) for value in (self.value, self.kind, self.harsh)}
        return "open" if len(met) > 1 else "met" if met == {True} else "missed"


def judged(expected: Figures, kind: Figures, harsh: Figures) -> tuple[Judged, ...]:
    """Every goal by the figures of three predictions."""
    return tuple(
        Judged(goal, *(goal.value(figures) for figures in (expected, kind, harsh))) for goal in GOALS
    )
