"""Applies a site's score expression (`ScoreSpec.mod`): scores, what is seen, and weights.

Shapes: scores fp32 [B, Hkv, G, S, T]. Rows of padding (negative query positions) are left as they are and see all keys,
so that what they give is finite; keys that are no token (negative positions) get anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.expression import ScoreMod
from kvcompile.kernels.reference.scores import probabilities
from kvcompile.kernels.shared.expression import Places, evaluate


@dataclass(frozen=True)
class Applied:
    """A mod at given queries and keys.

    query: int64 [B, S]; key: int64 [B, T] or [B, Hkv or 1, T]; negative: padding, no token
    heads: KV heads, query heads a KV head; leaves: see `Places`
    """

    mod: ScoreMod
    query: Tensor
    key: Tensor
    heads: tuple[int, int]
    leaves: Sequence[Tensor]

    def _evaluate(self, number: int, score: Tensor | None = None) -> Tensor:
        places = Places(self.query.clamp(min=0), self.key.clamp(min=0), self.heads, self.leaves)
        (found,) = evaluate(self.mod, [number], places, score)
        if not isinstance(found, Tensor):
            found = torch.full((1, 1, 1, 1, 1), found, device=self.query.device)
        return found

    @property
    def masks_only(self) -> bool:
        """Whether it only hides: PyTorch's own attention can do that."""
        return self.mod.score is None and self.mod.weight is None

    @property
    def _padded(self) -> Tensor:
        return (self.query < 0)[:, None, None, :, None]

    def scores(self, scores: Tensor) -> Tensor:
        """What scores [B, Hkv, G, S, T], scaled and capped, become."""
        if self.mod.score is None:
            return scores
        return torch.where(self._padded, scores, self._evaluate(self.mod.score, scores).float())

    def seen(self) -> Tensor | None:
        """Which keys are seen, besides what else hides some: bool [B or 1, Hkv or 1, G or 1, S, T]; None: all."""
        return None if self.mod.mask is None else self._evaluate(self.mod.mask) | self._padded

    def weights(self, p: Tensor) -> Tensor:
        """What probabilities [B, Hkv, G, S, T] become."""
        if self.mod.empty_rows:
            p = p.nan_to_num(0.0)  # of a query that sees nothing
        if self.mod.weight is None:
            return p
        p = p * torch.where(self._padded, 1.0, self._evaluate(self.mod.weight).float())
        if self.mod.renormalise is None:
            return p
        return p / (p.sum(-1, keepdim=True) + self.mod.renormalise)


def applied(
    mod: ScoreMod | None,
    query: Tensor,
    key: Tensor,
    heads: tuple[int, int],
    leaves: Sequence[Tensor] | None,
) -> Applied | None:
    """The mod of a site at its queries and keys; None where it has none."""
    return None if mod is None else Applied(mod, query, key, heads, leaves or ())


def modified(mod: Applied | None, scores: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """What weighs the values, fp32 [B, Hkv, G, S, T], from scores that are scaled, capped and have their bias.

    seen: bool, broadcasting against the scores: what positions and the cache show
    """
    if mod is None:
        return probabilities(scores.masked_fill(~seen, float("-inf")), sinks)
    scores, own = mod.scores(scores), mod.seen()
    seen = seen if own is None else seen & own
    return mod.weights(probabilities(scores.masked_fill(~seen, float("-inf")), sinks))
