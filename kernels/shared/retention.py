"""Which tokens a retention by scores keeps (`layouts/retention/scored.py`).

It is shared by `kernels/reference/retention/by_score.py` and `kernels/triton/retention/select.py`.

Shapes: B sequences; Hs = Hkv score heads, or 1; N slots; T tokens, those of the slots and then the new ones. A token is
its position, int64 [B, Hs, T], -1 where there is none; scores are fp32 [B, Hs, T].

| score | after a pass that gave tokens `gained` |
|---|---|
| sum, mean_age | score + gained (Zhang et al. 2023, 4) |
| last | gained (Oren et al. 2024, 3) |
| vote | 1 + gained, averaged over `smooth` neighbours; of the last `recent` tokens 0 (Li et al. 2024, 4) |

Sinks and the last `recent` tokens stay, and of the others those of the highest score; of mean_age, of the highest
score per step since the token came. Of equals the oldest goes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.shared.stable_sort import order, places
from kvcompile.layouts import Scored

LATEST = torch.iinfo(torch.int32).max  # stands behind all positions


def held_in(token: Tensor, length: Tensor) -> Tensor:
    """Positions int64 [B, Hs, N] of the tokens in the slots of sequences of `length` [B]; -1 where there is none.

    token: integers [B, Hs, N]; slots fill in order, and what stands in the free ones means nothing
    """
    slot = torch.arange(token.shape[2], device=token.device)
    return torch.where(slot < length[:, None, None], token.long(), -1)


def ranks(held: Tensor) -> Tensor:
    """Each token's place among those kept, [B, Hs, N], from 0 in the order of positions; anything for no token."""
    # Slots without a token go last.
    return places(torch.where(held < 0, LATEST, held))


def scores_after(score: Tensor, gained: Tensor, tokens: Tensor, last: Tensor, retention: Scored) -> Tensor:
    """Scores [B, Hs, T] of slots and new tokens after a pass.

    score [B, Hs, N] before it; gained [B, Hs, T]: what it gave each token; last int64 [B, 1, 1]: its last position
    """
    new = gained.shape[2] - score.shape[2]
    match retention.score:
        case "last":
            return gained
        case "vote":
            eligible = (tokens >= 0) & (tokens <= last - retention.recent)
            voted = torch.where(eligible, gained, 0.0)
            # What got no vote must still stand above tokens that came after the vote, which have 0.
            return torch.where(eligible, 1.0 + _smoothed(voted, tokens, retention.smooth), 0.0)
        case _:
            before = torch.cat([score, score.new_zeros(*score.shape[:2], new)], dim=2)
            return torch.where(tokens >= 0, before + gained, 0.0)


def chosen(tokens: Tensor, scores: Tensor, last: Tensor, slots: int, retention: Scored) -> Tensor:
    """Which `slots` of the tokens stay, indices [B, Hs, slots] into T; those without a token come last."""
    value = scores
    if retention.score == "mean_age":
        value = scores / (last + 1 - tokens).clamp(min=1)
    protected = (tokens < retention.sinks) | (tokens > last - retention.recent)
    value = value.masked_fill(protected, float("inf")).masked_fill(tokens < 0, float("-inf"))
    # The newest first, and then by value without changing the order of equals: of them the oldest goes.
    newest = order(tokens, descending=True)
    ranked = order(value.gather(2, newest), descending=True, stable=True)
    return newest.gather(2, ranked)[:, :, :slots]


def _smoothed(votes: Tensor, tokens: Tensor, width: int) -> Tensor:
    """Votes averaged over `width` neighbours in the order of positions (zeros beyond the ends)."""
    if width == 1:
        return votes
    by_position = order(tokens)
    ordered = votes.gather(2, by_position)
    count = ordered.shape[2]
    total = torch.zeros_like(ordered)
    for shift in range(-(width // 2), width // 2 + 1):
        # By index, not by padding and slicing: from those, Inductor concludes on the number of tokens.
        neighbour = torch.arange(count, device=votes.device) + shift
        there = (neighbour >= 0) & (neighbour < count)
        total = total + torch.where(there, ordered[:, :, neighbour.clamp(0, count - 1)], 0.0)
    return torch.empty_like(votes).scatter_(2, by_position, total / width)
