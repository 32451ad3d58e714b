"""Answers for retention by scores, with a dictionary from kept token to score, and no slots.

Follows `layouts/retention/scored.py` pass by pass, as the tokens came: which tokens stay depends on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcompile.kernels.oracle.choice import Choice
from kvcompile.kernels.oracle.retention.hooks import Hooks, Pass, View
from kvcompile.layouts import Scored


@dataclass
class ByScore(Hooks[Scored]):
    """The tokens of one head, or of a whole layer, and their scores.

    kept: the score of each token that stays; there: the tokens of the last view
    """

    kept: dict[int, float] = field(default_factory=dict)
    there: list[int] = field(default_factory=list)

    def together(self, kv_heads: int) -> list[slice]:
        if self.retention.granularity == "layer":
            return [slice(0, kv_heads)]
        return [slice(head, head + 1) for head in range(kv_heads)]

    def passes(self, came: Sequence[Pass]) -> Sequence[Pass]:
        return came

    def view(self, one: Pass, queries: Tensor, shown: Tensor, held: Tensor | None) -> View:
        """One new token takes a place first; many see all that was kept, and each other."""
        if one.columns == 1:
            self._take(one.start, _tokens(held))
        self.there = sorted({*self.kept, *queries.tolist()})
        tokens = torch.tensor(self.there, device=queries.device)
        seen = shown[..., tokens]
        if not self.retention.in_cache:
            return View(tokens, seen, queries, tokens)
        places = torch.arange(len(tokens), device=queries.device)
        return View(tokens, seen, places[-len(queries) :], places)

    def note(self, one: Pass, p: Tensor, held: Tensor | None) -> None:
        shares = self._pooled(p)
        if one.columns == 1:
            self.kept = self._credited(self.kept, self._of_tokens(shares[0]))
            return
        rows = {"last": 1}.get(self.retention.score, self.retention.rows or one.columns)
        gained, last = self._of_tokens(shares[max(one.tokens - rows, 0) :].sum(0)), self.there[-1]
        if self.retention.score == "vote":
            kept = self._votes(gained, last)
        else:
            kept = self._credited({token: self.kept.get(token, 0.0) for token in self.there}, gained)
        self.kept = self._choose(kept, last, min(len(kept), self.retention.tokens), _tokens(held))

    def _pooled(self, p: Tensor) -> Tensor:
        """The weights [H, Q, K] pooled over heads."""
        match self.retention.pooling:
            case "sum":
                return p.sum(0)
            case "mean":
                return p.mean(0)
            case "max":
                return p.amax(0)

    def _of_tokens(self, shares: Tensor) -> dict[int, float]:
        return dict(zip(self.there, shares.tolist(), strict=True))

    def _take(self, now: int, forced: set[int] | None) -> None:
        """A place for the token at `now`, of the `forced` ones that were kept after it came."""
        kept = self.kept
        if forced is not None and now not in forced:
            raise ValueError(f"the token at position {now} was not kept when it came")
        if len(kept) == self.retention.tokens:
            before = None if forced is None else forced - {now}
            kept = self._choose(kept, now - 1, self.retention.tokens - 1, before, newcomer=now)
        elif forced is not None and forced != kept.keys() | {now}:
            raise ValueError(f"kept {sorted(forced)} of {sorted(kept)} and {now}, where all had a place")
        self.kept = {**kept, now: 0.0}

    def _credited(self, kept: dict[int, float], share: dict[int, float]) -> dict[int, float]:
        match self.retention.score:
            case "last":
                return share
            case "vote":
                return kept
            case _:
                return {token: score + share[token] for token, score in kept.items()}

    def _votes(self, gained: dict[int, float], last: int) -> dict[int, float]:
        voters = self.retention.recent
        votes = [gained[t] if t <= last - voters else 0.0 for t in gained]
        half = self.retention.smooth // 2
        smoothed = [
            sum(votes[max(i - half, 0) : i + half + 1]) / self.retention.smooth for i in range(len(votes))
        ]
        return {t: 1 + s if t <= last - voters else 0.0 for t, s in zip(gained, smoothed, strict=True)}

    def _choose(
        self,
        kept: dict[int, float],
        last: int,
        count: int,
        forced: set[int] | None,
        newcomer: int | None = None,
    ) -> dict[int, float]:
        """The `count` tokens that stay when those up to `last` have been scored."""
        if count == len(kept) and forced is None:
            return kept
        newest = last if newcomer is None else newcomer
        candidates = [t for t in kept if self.retention.sinks <= t <= newest - self.retention.recent]
        ages = self.retention.score == "mean_age"
        value = {t: kept[t] / (last + 1 - t) if ages else kept[t] for t in candidates}
        # Of equal values the oldest goes.
        going = set(sorted(candidates, key=lambda t: (value[t], t))[: len(kept) - count])
        stay = {t for t in kept if t not in going} if forced is None else forced
        if len(stay) != count or not stay <= kept.keys() or not (kept.keys() - stay) <= set(candidates):
            raise ValueError(
                f"kept {sorted(stay)} of {sorted(kept)} after position {last}: expected {count} tokens, of which only "
                f"those of {candidates} may go"
            )
        if candidates:
            order = [value[t] for t in candidates]
            self.choices.append(
                Choice(torch.tensor(order), torch.tensor([t not in stay for t in candidates]))
            )
        return {t: score for t, score in kept.items() if t in stay}


def _tokens(held: Tensor | None) -> set[int] | None:
    return None if held is None else {token for token in held.tolist() if token >= 0}
