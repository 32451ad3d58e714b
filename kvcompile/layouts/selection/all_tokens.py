"""AllTokens: a query reads every token that its retention keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AllTokens:
    """No selection."""

    kind: Literal["full"] = "full"

    @property
    def selects(self) -> bool:
        """Whether some tokens that are kept are not read."""
        return False

    def __str__(self) -> str:
        return "full"
