"""Defines what a step of the reference asks a retention: a token's slot, what a query sees, what is noted after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference.slots import Stored
from kvcompile.layouts import CacheLayout, Retention

AttendMany = Callable[[AttendInputs, Tensor, Tensor, Tensor, Tensor | None], Tensor]
# Positions of the tokens in the slots and of the new ones, [B, Hs, N + S], -1: none; and what each gained, fp32.
Gained = tuple[Tensor, Tensor]
R = TypeVar("R", bound=Retention)


@dataclass(frozen=True)
class Hooks(ABC, Generic[R]):
    """One retention in the steps of `kernels/reference/attention.py`, which call these in the order of their lines.

    A step of one token: `slot`, `held`, `visible`, `places`, `note`. Of many tokens: `slot` where slots are never
    reused, `held`, `attend_many`, and where slots are reused `keep`.
    """

    retention: R

    @abstractmethod
    def slot(self, x: AttendInputs) -> Tensor:
        """Take slots for new tokens that are written before they attend, and note them; slots as `write` has them."""

    @abstractmethod
    def held(self, x: AttendInputs, length: Tensor) -> Tensor:
        """Positions of the tokens in the slots that are read, of sequences of `length` [B]; -1: none.

        Returns [B, T], or [B, Hs, T] where heads keep tokens of their own.
        """

    @abstractmethod
    def visible(self, x: AttendInputs, tokens: Tensor) -> Tensor:
        """Which of `tokens` (as `held` gives them) the one query of each sequence sees, bool [B, Hkv or 1, T]."""

    def places(self, x: AttendInputs, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where the query [B, 1] and `tokens` (their shape) count as standing; None: at their own positions."""
        return None

    def note(self, x: AttendInputs, p: Tensor) -> None:
        """Note what the one query's probabilities p fp32 [B, Hkv, G, T] say of the slots."""

    @abstractmethod
    def attend_many(
        self, x: AttendInputs, read: CacheLayout, stored: Stored, attend: AttendMany
    ) -> tuple[Tensor, Gained | None]:
        """Many queries' results [B, Hq, S, Dv], and what tokens gained by them, where that counts.

        Args:
            read: the layout in the basis that is read (`kv_sides.as_read`).
            stored: what the slots hold: the new tokens too, where slots are never reused.
            attend: what attends where only positions count.
        """

    @abstractmethod
    def keep(self, x: AttendInputs, stored: Stored, gained: Gained | None) -> None:
        """Give the slots to those of many tokens that stay, after all have attended."""
