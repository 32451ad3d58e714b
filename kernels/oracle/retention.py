"""The oracle of retention by scores: for each head a dictionary from kept token to score, and no slots.

Follows `layouts/retention/scored.py` pass by pass, as the tokens came: which tokens stay depends on that. Shared with
`kernels/reference/scored.py` are the vectors' rounding and nothing else.

A choice between two tokens whose scores are equal but for rounding may fall either way, and what comes after differs
with it. So a caller that has run something else may give what was kept there (`held`): the oracle then attends to that,
and tells of each choice the scores that it would have chosen by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.oracle import quantize
from kvcompile.kernels.oracle.attention import Scales, final_scores, modified
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import InKeys, Scored, Storage


@dataclass(frozen=True)
class Choice:
    """One choice: `values` fp32 [candidates], by which the lowest go, and which of them went [candidates]."""

    values: Tensor
    gone: Tensor

    @property
    def excess(self) -> float:
        """By how much the highest that went exceeds the lowest that stayed; not positive: as it should be."""
        if not bool(self.gone.any()) or bool(self.gone.all()):
            return float("-inf")
        return float(self.values[self.gone].max() - self.values[~self.gone].min())


def scored_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: SiteSpec,
    rope: list[Tensor],
    chunks: Sequence[int],
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    held: Sequence[Tensor] | None = None,
    scales: Scales = (None, None),
    leaves: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Choice]]:
    """q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] of whole sequences -> [B, Hq, T, Dv], and the choices.

    Args:
        rope: [cos, sin] tables where keys rotate when they are read (q and k before RoPE), else [].
        chunks: how many columns came together, pass by pass; T in all.
        padding: int64 [B], padded columns on the left of each sequence; their rows mean nothing.
        scales: the calibrated scales of K and V, fp32 [Hkv] each; None where their storage has none.
        held: after each pass, the tokens that were kept, [B, Hs, N], -1 for none; None: as the oracle chooses.

    Raises:
        ValueError: `held` has a token that was not there, lacks one that always stays, or another number of tokens.
    """
    rows, choices = [], []
    for row in range(q.shape[0]):
        first = 0 if padding is None else int(padding[row])
        own = None if held is None else [tokens[row] for tokens in held]
        sequence = _Sequence(
            q[row, :, first:], k[row, :, first:], v[row, :, first:], spec, rope, sinks, bias, scales, leaves
        )
        out = sequence.run(_passes(chunks, first), own)
        choices += sequence.choices
        rows.append(torch.cat([out.new_zeros(out.shape[0], first, out.shape[2]), out], dim=1))
    return torch.stack(rows).to(q.dtype), choices


def _passes(chunks: Sequence[int], padding: int) -> list[tuple[int, int]]:
    """(columns, tokens) of each pass, for a sequence behind `padding` columns."""
    passes, start = [], 0
    for size in chunks:
        passes.append((size, size - min(max(padding - start, 0), size)))
        start += size
    return passes


class _Sequence:
    """One sequence without padding: q [Hq, T, D], k [Hkv, T, D], v [Hkv, T, Dv]."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: SiteSpec,
        rope: list[Tensor],
        sinks: Tensor | None,
        bias: Tensor | None,
        scales: Scales,
        leaves: Sequence[Tensor],
    ):
        assert isinstance(spec.layout.retention, Scored)
        self.retention, self.spec, self.rope = spec.layout.retention, spec, rope
        self.sinks, self.bias, self.leaves = sinks, bias, leaves
        self.q = q.float()
        # As old tokens come back, and as the newest do.
        keys, values = spec.layout.keys, spec.layout.values
        self.k = quantize.older_and_newest(keys, k, scales[0])
        if isinstance(values, InKeys):
            self.v, self.v_owner = tuple(x[..., : values.channels] for x in self.k), keys
        else:
            self.v, self.v_owner = quantize.older_and_newest(values, v, scales[1]), values
        self.group = q.shape[0] // k.shape[0]
        self.choices: list[Choice] = []

    def run(self, passes: list[tuple[int, int]], held: list[Tensor] | None) -> Tensor:
        heads = list(range(self.k[0].shape[0]))
        units = [heads] if self.retention.granularity == "layer" else [[head] for head in heads]
        out = self.q.new_zeros(*self.q.shape[:2], self.v[0].shape[-1])
        for number, unit in enumerate(units):
            kept: dict[int, float] = {}
            start = 0
            for index, (columns, tokens) in enumerate(passes):
                forced = None if held is None else {t for t in held[index][number].tolist() if t >= 0}
                if tokens == 0:
                    continue
                step = self._one if columns == 1 else self._many
                kept = step(unit, kept, start, tokens, columns, forced, out)
                start += tokens
        return out

    def _one(
        self,
        unit: list[int],
        kept: dict[int, float],
        now: int,
        tokens: int,
        columns: int,
        forced: set[int] | None,
        out: Tensor,
    ) -> dict[int, float]:
        """A step of one token: it takes a place first."""
        if forced is not None and now not in forced:
            raise ValueError(f"the token at position {now} was not kept when it came")
        if len(kept) == self.retention.tokens:
            before = None if forced is None else forced - {now}
            kept = self._choose(kept, now - 1, self.retention.tokens - 1, before, newcomer=now)
        elif forced is not None and forced != kept.keys() | {now}:
            raise ValueError(f"kept {sorted(forced)} of {sorted(kept)} and {now}, where all had a place")
        kept = {**kept, now: 0.0}
        share = self._attend(unit, sorted(kept), [now], out)[0]
        return self._credited(kept, dict(zip(sorted(kept), share.tolist(), strict=True)))

    def _credited(self, kept: dict[int, float], share: dict[int, float]) -> dict[int, float]:
        match self.retention.score:
            case "last":
                return share
            case "vote":
                return kept
            case _:
                return {token: score + share[token] for token, score in kept.items()}

    def _many(
        self,
        unit: list[int],
        kept: dict[int, float],
        start: int,
        tokens: int,
        columns: int,
        forced: set[int] | None,
        out: Tensor,
    ) -> dict[int, float]:
        """A pass of many columns, of which the last `tokens` are the sequence's."""
        new = list(range(start, start + tokens))
        there = sorted(kept) + new
        shares = self._attend(unit, there, new, out)
        rows = {"last": 1}.get(self.retention.score, self.retention.rows or columns)
        gained = dict(zip(there, shares[max(tokens - rows, 0) :].sum(0).tolist(), strict=True))
        last = new[-1]
        kept = {token: kept.get(token, 0.0) for token in there}
        if self.retention.score == "vote":
            kept = self._votes(gained, last)
        else:
            kept = self._credited(kept, gained)
        return self._choose(kept, last, min(len(kept), self.retention.tokens), forced)

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

    def _in_full(self, storage: Storage, queries: list[int], key: Tensor) -> Tensor:
        """Which keys each query sees as the newest come back, bool [queries, keys]."""
        first = torch.tensor([quantize.newest_from(storage, query + 1) for query in queries])
        return key[None] >= first[:, None]

    def _attend(self, unit: list[int], there: list[int], queries: list[int], out: Tensor) -> Tensor:
        """Attention of `queries` over the tokens `there` (ascending); returns the shares [queries, there]."""
        retention, spec = self.retention, self.spec
        key = torch.tensor(there)
        query = torch.tensor(queries)
        hidden = key[None] > query[:, None]
        if retention.in_cache:
            query_place = torch.tensor([there.index(t) for t in queries])
            place = torch.arange(len(there))
        else:
            query_place, place = query, key
        probabilities = []
        for head in unit:
            own = slice(head * self.group, (head + 1) * self.group)
            q = self.q[own, queries]
            ks, vs = (tuple(x[head, there] for x in pair) for pair in (self.k, self.v))
            if self.rope:
                ks = tuple(rotate(k[None, None], place[None], *self.rope, form=spec.rotary)[0, 0] for k in ks)
                q = rotate(q[None].to(ks[0].dtype), query_place[None], *self.rope, form=spec.rotary)[
                    0
                ].float()
            older, newest = (q @ k.float().T for k in ks)
            scores = torch.where(self._in_full(spec.layout.keys, queries, key), newest, older) * spec.sm_scale
            bias = self.bias if self.bias is None or len(self.bias) == 1 else self.bias[own]
            scores = final_scores(scores, spec.score, bias, query_place, place)
            sinks = None if self.sinks is None else self.sinks[own]
            at = (query_place, place)
            p = modified(spec.score.mod, scores[None], ~hidden, sinks, self.leaves, at, own.start)[0]
            v_full = self._in_full(self.v_owner, queries, key)
            out[own, queries] = (
                p.masked_fill(v_full, 0) @ vs[0].float() + p.masked_fill(~v_full, 0) @ vs[1].float()
            )
            probabilities.append(p)
        together = torch.cat(probabilities)
        match retention.pooling:
            case "sum":
                return together.sum(0)
            case "mean":
                return together.mean(0)
            case "max":
                return together.amax(0)
