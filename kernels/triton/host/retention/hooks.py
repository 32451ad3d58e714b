"""Defines what a step of generated kernels asks a retention, and answers for those by positions: nothing is noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from kvcompile.kernels.triton.host.call import Call, New

# Of each slot, int32 [B, Hs, N] each: its token, and the token's place in the cache; None where no kernel asks for it.
Standing = tuple[Tensor | None, Tensor | None]


class Hooks:
    """One retention in the steps of `kernels/triton/host/attention.py`, which call these in the order of their lines.

    A step of one token: `standing`, `note`. Of many tokens: `standing`, and where slots are reused `keep`.
    """

    # What prefill gives besides the output, as its options name it; what decode gives is in `tracked`.
    many: ClassVar[tuple[str, ...]] = ()

    def tracked(self, call: Call) -> tuple[str, ...]:
        """What decode gives besides the output, as its options name it."""
        return ()

    def standing(self, call: Call) -> Standing:
        """The tokens in the slots, where the kernels that attend do not know them by the slot."""
        return None, None

    def note(self, call: Call, found: Sequence[Tensor]) -> None:
        """Note what decode has found (`tracked`)."""

    def keep(self, call: Call, new: New, standing: Standing, found: Sequence[Tensor]) -> Tensor | None:
        """Which slots many new tokens take after they have attended, as `settle` has them; None: by their positions.

        found: what prefill has given besides the output (`many`)
        """
        return None
