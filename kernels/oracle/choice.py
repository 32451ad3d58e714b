"""Holds a choice between tokens or pages that rounding may let fall either way, as the oracle would have made it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """One choice: `values` fp32 [candidates], by which the lowest go, and which of them went [candidates]."""

    values: Tensor
    gone: Tensor

    @property
    def excess(self) -> float:
        """By how much the highest that went exceeds the lowest that stayed; not positive: as it should be."""
        if not bool(self.gone.any()) or bool(self.gone.all()):
            return float("-inf")
        return float(self.values[self.gone].max() - self.values[~self.gone].min())
