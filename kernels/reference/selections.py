"""Chooses and gathers the slots that a decode step reads, where a selection reads some (`layouts/selection/`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import page_selection, paged
from kvcompile.kernels.reference.residual import take
from kvcompile.layouts import InKeys, Storage, TopPages

# By the kind of a selection, what notes a call's new tokens and chooses: slots [B, Hkv, N], of which N is the same at
# any length; None: the call reads all, as one of many tokens does. What is no token's is -1, or not below the length.
Select = Callable[[AttendInputs], Tensor | None]
SELECT: dict[str, Select] = {TopPages.kind: page_selection.select}


def gathered(
    storage: Storage | InKeys, parts: list[Tensor], slot: Tensor, span: int, table: Tensor | None
) -> list[Tensor]:
    """The parts at `slot` [B, Hkv, N], or as they are where their rows are fixed: [B, Hkv, N, ...]."""
    own = storage.parts(128, torch.float32)
    slot = slot.clamp(0, span - 1)
    return [
        part if of.fixed else take(part, slot) if table is None else paged.at(part, table, slot)
        for part, of in zip(parts, own, strict=True)
    ]
