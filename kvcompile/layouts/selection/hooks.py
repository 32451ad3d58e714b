"""What every selection says of itself: what it notes of tokens, what that takes, how small it can be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

import sympy
import torch

from kvcompile.layouts.buffer import BufferSpec


class Hooks(ABC):
    """What other rooms ask a selection, and what one answers that notes nothing.

    A selection is a frozen dataclass that says `kind` and `small`.
    """

    selects: ClassVar[bool] = True  # whether some tokens that are kept are not read
    num_notes: ClassVar[int] = 0  # how many tensors `notes` has
    # The note that says what the last step read, where a near tie may fall either way: verification follows it.
    followed: ClassVar[str | None] = None

    if TYPE_CHECKING:  # a field of the dataclasses

        @property
        def kind(self) -> str: ...

    @abstractmethod
    def small(self, size: int, count: int) -> Self:
        """The selection by parts of at most `size` tokens, of which it reads `count`: verification has more of them."""

    def notes(
        self, num_kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype
    ) -> tuple[BufferSpec, ...]:
        """The tensors of one sequence in which the layer notes what it chooses by."""
        return ()

    def bytes(self, slots: sympy.Expr) -> sympy.Expr:
        """Bytes of one KV head's notes of `slots` slots."""
        return sympy.Integer(0)

    def bytes_per_slot(self) -> sympy.Expr:
        """Bytes that one more token takes in one KV head's notes, on average."""
        return sympy.Integer(0)
