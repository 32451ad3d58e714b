"""AllTokens: a query reads every token that its retention keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvcompile.layouts.selection.hooks import Hooks


@dataclass(frozen=True)
class AllTokens(Hooks):
    """No selection."""

    kind: Literal["full"] = "full"

    selects = False

    def small(self, size: int, count: int) -> AllTokens:
        return self

    def __str__(self) -> str:
        return "full"
