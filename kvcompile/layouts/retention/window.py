"""The newest tokens stay (sliding window attention, as Mistral's layers have it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy

from kvcompile.layouts.retention.hooks import Hooks


@dataclass(frozen=True)
class Window(Hooks):
    """The last `size` tokens, the query's own among them."""

    size: int
    kind: Literal["window"] = "window"

    @property
    def sinks(self) -> int:
        return 0

    @property
    def window(self) -> int:
        return self.size

    def budget(self) -> sympy.Expr:
        return sympy.Integer(self.size)

    def small(self, sinks: int, window: int, heavy: int) -> Window:
        return Window(min(self.size, window))

    def __str__(self) -> str:
        return f"window {self.size}"
