"""Which tokens stay after a pass over many, by their scores: one sort per head (`layouts/scored.py`).

Shapes: slots' token int32 and score float32 [B, Hs, N], Hs = Hkv or 1; gained float32 [B, Hs, N + S], what this pass
gave the tokens in the slots and then the new ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.layouts import Scored

_LATEST = torch.iinfo(torch.int32).max


def ranks(token: Tensor, length: Tensor) -> Tensor:
    """Each slot's place among the tokens of sequences of `length` [B, 1], [B, Hs, N]; anything where it holds none."""
    slot = torch.arange(token.shape[2], device=token.device)
    order = torch.where(slot < length[:, None], token.long(), _LATEST).argsort(-1)
    return torch.empty_like(order).scatter_(2, order, slot.expand_as(order))


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
    slot = torch.arange(slots, device=token.device)
    held = torch.where(slot < before[:, None], token.long(), -1)
    own = torch.where(positions < 0, -1, positions)[:, None].expand(-1, heads, -1)
    tokens, last = torch.cat([held, own], dim=2), positions[:, -1:, None]
    scores = _after(score, gained, tokens, last, retention)
    kept = _kept(tokens, scores, last, slots, retention)
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


def _after(score: Tensor, gained: Tensor, tokens: Tensor, last: Tensor, retention: Scored) -> Tensor:
    """Scores [B, Hs, N + S] after a pass."""
    new = gained.shape[2] - score.shape[2]
    match retention.score:
        case "last":
            return gained
        case "vote":
            # What got no vote must still stand above tokens that came after the vote, which have 0.
            eligible = (tokens >= 0) & (tokens <= last - retention.recent)
            voted = torch.where(eligible, gained, 0.0)
            return torch.where(eligible, 1.0 + _smoothed(voted, tokens, retention.smooth), 0.0)
        case _:
            before = torch.cat([score, score.new_zeros(*score.shape[:2], new)], dim=2)
            return torch.where(tokens >= 0, before + gained, 0.0)


def _smoothed(votes: Tensor, tokens: Tensor, width: int) -> Tensor:
    """Votes averaged over `width` neighbours in the order of positions, zeros beyond the ends."""
    if width == 1:
        return votes
    order = tokens.argsort(-1)
    ordered = votes.gather(2, order)
    count = ordered.shape[2]
    place = torch.arange(count, device=votes.device)
    total = torch.zeros_like(ordered)
    for shift in range(-(width // 2), width // 2 + 1):
        there = (place + shift >= 0) & (place + shift < count)
        total = total + torch.where(there, ordered[:, :, (place + shift).clamp(0, count - 1)], 0.0)
    return torch.empty_like(votes).scatter_(2, order, total / width)


def _kept(tokens: Tensor, scores: Tensor, last: Tensor, slots: int, retention: Scored) -> Tensor:
    """Which tokens stay, bool [B, Hs, N + S]: at most `slots` of them."""
    value = scores
    if retention.score == "mean_age":
        value = scores / (last + 1 - tokens).clamp(min=1)
    protected = (tokens < retention.sinks) | (tokens > last - retention.recent)
    value = value.masked_fill(protected, float("inf")).masked_fill(tokens < 0, float("-inf"))
    # The newest first, and then by value without changing the order of equals: of them the oldest goes.
    newest = tokens.argsort(-1, descending=True)
    ranked = value.gather(2, newest).argsort(dim=-1, descending=True, stable=True)
    chosen = newest.gather(2, ranked)[:, :, :slots]
    stay = torch.zeros_like(tokens, dtype=torch.bool).scatter(2, chosen, True)
    return stay & (tokens >= 0)
