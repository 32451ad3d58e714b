"""What serving is held to, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """most: whether it is an upper bound; figure: of the results of all loads, whose keys may be missing"""

    name: str
    bound: float
    most: bool
    figure: Callable[[dict[str, Any]], float]

    def met(self, value: float) -> bool:
        return value <= self.bound if self.most else value >= self.bound


GOALS = (
    Goal("decode, 8 texts at 512 / one", 4.0, False, lambda r: r["decodes"]["ratio"]),
    Goal(
        "offline / transformers continuous batching",
        2.0,
        False,
        lambda r: r["peers"]["ratio"]["transformers"],
    ),
    Goal("offline / our static batches", 1.5, False, lambda r: r["peers"]["ratio"]["static"]),
    Goal("scheduler and tables / step of 8", 0.03, True, lambda r: r["decodes"]["rest_share"]),
    Goal("shared: first token, hit / cold", 0.10, True, lambda r: r["shared"]["ratio"]),
    Goal("prefix cache, cost at 0 % hits", 0.02, True, lambda r: r["no_hits"]["cost"]),
    Goal("waste, pages of a text", 1.0, True, lambda r: r["waste"]["pages"]),
    Goal(
        "8 texts of a 512 prompt: pages / (prompt + own)", 1.05, True, lambda r: r["samples"]["512"]["ratio"]
    ),
    Goal("half the pages / ample", 0.7, False, lambda r: r["squeeze"]["ratio"]),
    Goal(
        "gap p99 while 2,048 tokens come in / (chunk pass + decode pass)",
        1.2,
        True,
        lambda r: r["long_prompt"]["512"]["ratio"],
    ),
    Goal("int8 texts in equal memory / fp16", 1.9, False, lambda r: r["int8"]["ratio"]),
)


def lines(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(goal, bound, measured, met) of every goal; what was not measured says so."""
    found = []
    for goal in GOALS:
        bound = f"{'≤' if goal.most else '≥'} {goal.bound:g}"
        try:
            value = goal.figure(results)
        except KeyError:
            found.append((goal.name, bound, "not measured", ""))
            continue
        found.append((goal.name, bound, f"{value:.3f}", "yes" if goal.met(value) else "no"))
    return found
