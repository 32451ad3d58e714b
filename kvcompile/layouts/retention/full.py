"""Every token stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import sympy

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.retention.hooks import Hooks

if TYPE_CHECKING:
    from kvcompile.specs import MaskSpec


@dataclass(frozen=True)
class Full(Hooks):
    """Every token, up to the limit of tokens."""

    kind: Literal["full"] = "full"

    keeps_all = True
    placement = "contiguous"

    @property
    def sinks(self) -> int:
        return 0

    @property
    def window(self) -> int | None:
        return None

    def budget(self) -> sympy.Expr:
        return sy.T

    def small(self, sinks: int, window: int, heavy: int) -> Full:
        return self

    def exact(self, mask: MaskSpec) -> tuple[bool, str]:
        return True, f"keeps all that a {mask} mask shows"

    def __str__(self) -> str:
        return "full"
