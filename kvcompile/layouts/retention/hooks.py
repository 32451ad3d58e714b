"""What every retention says of itself: how many slots it takes, what a query sees of them, how small it can be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import sympy

from kvcompile.layouts.buffer import BufferSpec

if TYPE_CHECKING:
    from kvcompile.specs import MaskSpec


class Hooks(ABC):
    """What other rooms ask a retention, and what most answer.

    A retention is a frozen dataclass that says `kind`, `sinks`, `window`, `budget` and `small`; the other answers are
    those of one that keeps the first `sinks` tokens, and the newest `window` in slots that are taken in turns.
    """

    by_score: ClassVar[bool] = False  # whether attention decides which tokens stay, and positions do not
    keeps_all: ClassVar[bool] = False
    placement: ClassVar[Literal["contiguous", "ring", "slots"]] = "ring"  # where a recipe names none
    num_notes: ClassVar[int] = 0  # how many tensors `notes` has
    # The note that says which tokens stayed, where a near tie may fall either way: verification follows it.
    followed: ClassVar[str | None] = None

    if TYPE_CHECKING:  # fields of the dataclasses, or properties; here they would be defaults of the fields

        @property
        def kind(self) -> str: ...

        @property
        def sinks(self) -> int:
            """First tokens, which always stay."""
            ...

        @property
        def window(self) -> int | None:
            """The newest tokens that have a slot, a query's own among them; None: no token goes by its age."""
            ...

    @abstractmethod
    def budget(self) -> sympy.Expr:
        """Live tokens at most."""

    @abstractmethod
    def small(self, sinks: int, window: int, heavy: int) -> Self:
        """The retention with at most so many first, newest and chosen tokens: verification meets its end soon then."""

    @property
    def in_cache(self) -> bool:
        """Whether positions count from the start of the cache instead of the sequence."""
        return False

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.kind

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt must come in one pass."""
        return False

    @property
    def state_heads(self) -> sympy.Expr:
        """How many heads note something of each slot: none, one for all, or each KV head, H."""
        return sympy.Integer(0)

    def notes(self, num_kv_heads: int) -> tuple[BufferSpec, ...]:
        """The tensors of one sequence in which the layer notes what stays by."""
        return ()

    def bytes_per_slot(self) -> sympy.Expr:
        """Bytes of all heads' notes of one slot, in H."""
        return sympy.Integer(0)

    @property
    def shown(self) -> tuple[sympy.Basic, ...]:
        """Relations of `symbols.query` and `symbols.key` that hold where a query sees a key that has a slot.

        None: a query sees the first `sinks` tokens and the newest `window`.
        """
        return ()

    def exact(self, mask: MaskSpec) -> tuple[bool, str]:
        """Whether the retention keeps all that a site's own mask shows, and why."""
        window = None if self.shown else self.window
        if mask.window is not None and window is not None and window >= mask.window:
            return True, f"the layer sees {mask.window} tokens, the window keeps {window}"
        return False, f"forgets tokens that a {mask} mask would still show"
