"""The slots of tokens that stay after a pass over many: one sort per head (`kernels/shared/retention.py`,
`layouts/retention/scored.py`).

Shapes: slots' token int32 and score float32 [B, Hs, N], Hs = Hkv or 1; gained float32 [B, Hs, N + S], what this pass
gave the tokens in the slots and then the new ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.shared.retention import chosen, held_in, scores_after
from kvcompile.layouts import Scored


def staying(
    token: Tensor, score: Tensor, gained: Tensor, positions: Tensor, before: Tensor, retention: Scored
) -> tuple[Tensor, Tensor, Tensor]:
    """Where new tokens go, and what the slots hold then.

    Args:
        positions: int64 [B, S], negative for padding; before: tokens that the sequences had, [B, 1].

    Returns:
        slots int32 [B, Hs, S], -1 for tokens that do not stay; scores [B, Hs, N]; tokens int32 [B, Hs, N].
    """
    heads, slots = token.shape[1], token.shape[2]
    held = held_in(token, before[:, 0])
    own = torch.where(positions < 0, -1, positions)[:, None].expand(-1, heads, -1)
    tokens, last = torch.cat([held, own], dim=2), positions[:, -1:, None]
    scores = scores_after(score, gained, tokens, last, retention)
    best = chosen(tokens, scores, last, slots, retention)
    kept = torch.zeros_like(tokens, dtype=torch.bool).scatter(2, best, True) & (tokens >= 0)
    # Slots that are given up, those that are free last: they fill in order.
    free = torch.where(held < 0, 2, torch.where(kept[:, :, :slots], 3, 1)).argsort(dim=-1, stable=True)
    stays = kept[:, :, slots:]
    rank = (stays.long().cumsum(-1) - 1).clamp(min=0)
    target = free.gather(2, rank.clamp(max=slots - 1))
    # What does not stay goes to one more slot, which is dropped.
    at = torch.where(stays, target, slots)

    def settled(old: Tensor, new: Tensor) -> Tensor:
        longer = torch.cat([old, old.new_zeros(*old.shape[:2], 1)], dim=2)
        return longer.scatter(2, at, new.to(old.dtype))[:, :, :slots]

    to = torch.where(stays, target, -1).to(torch.int32)
    return to, settled(scores[:, :, :slots], scores[:, :, slots:]), settled(token, own)
