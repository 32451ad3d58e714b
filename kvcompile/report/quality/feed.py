"""A text into a model with a cache, piece by piece, without a reset in between.

Retentions by position and all storages give the same in any pieces (`CacheLayout.chunk_invariant`), so pieces may
be large. Where what is forgotten depends on how tokens come, they come one by one, as when a text is generated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.plan import Plan
from kvcompile.report.quality.settings import CHUNK
from kvcompile.runtime.module import CachedModel


def step_of(plan: Plan, wanted: int | str) -> int:
    """Tokens in one piece.

    Raises:
        ValueError: more than one was asked for, of a plan whose results would be others.
    """
    if isinstance(wanted, str):
        return CHUNK if plan.chunk_invariant else 1
    if wanted != 1 and not plan.chunk_invariant:
        raise ValueError(
            f"recipe {plan.recipe!r}: what it forgets depends on how tokens come, so they must come one by one as in "
            f"generation: step auto or 1, got {wanted}"
        )
    return wanted


def feed(fast: CachedModel, ids: Tensor, step: int, keep: int | None = None) -> Tensor:
    """Append `ids` int64 [1, n] to the cache; logits [n or keep, V] of the last `keep` tokens (None: all)."""
    size = ids.shape[1]
    wanted = size if keep is None else keep
    pieces = []
    for start in range(0, size, step):
        piece = ids[:, start : start + step]
        # Of this piece, what stands within the last `wanted` of all.
        kept = min(piece.shape[1], wanted - (size - start - piece.shape[1]))
        logits = fast._call(piece, None, keep=max(kept, 1))[fast.program.logits][0]
        if kept > 0:
            pieces.append(logits[-kept:])
    return torch.cat(pieces)
