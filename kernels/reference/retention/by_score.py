"""Answers for retention by scores (`layouts/retention/scored.py`), whose slots are in any order.

Shapes as in `kernels/inputs.py`; besides K's and V's parts a layer has, per slot, the position of its token [B, Hs, N]
(int32) and its score [B, Hs, N] (fp32), Hs = Hkv, or 1 where a layer has one score for all heads. Slots fill in order:
of a sequence of `length` tokens the first min(length, N) hold one, and what stands in the others means nothing.

One new token takes its slot, attends to all slots, and leaves its probabilities there. Many attend to the slots and to
themselves; then those that stay are written, in the order of their score.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import paged, residual, residual_views, score_sums
from kvcompile.kernels.reference.kv_sides import sides
from kvcompile.kernels.reference.retention.hooks import AttendMany, Gained, Hooks
from kvcompile.kernels.reference.slots import Stored
from kvcompile.kernels.reference.symbolic import evaluate
from kvcompile.kernels.shared.dialect import current
from kvcompile.kernels.shared.retention import LATEST, chosen, held_in, ranks, scores_after
from kvcompile.kernels.shared.rope import rotate
from kvcompile.layouts import CacheLayout, Scored
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storage import is_fp8


class ByScore(Hooks[Scored]):
    """The tokens with the highest scores stay, which attention has given them."""

    def slot(self, x: AttendInputs) -> Tensor:
        token, score = x.notes
        position = x.positions[:, None]
        slot = slot_for(token, score, position, x.spec.layout.address, self.retention)
        _note(token, slot, position.to(token.dtype))
        _note(score, slot, torch.zeros((), device=score.device))
        return slot

    def held(self, x: AttendInputs, length: Tensor) -> Tensor:
        return held_in(x.notes[0], length)

    def places(self, x: AttendInputs, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.retention.in_cache:
            return None
        return x.positions.clamp(max=self.retention.tokens - 1), ranks(tokens)

    def visible(self, x: AttendInputs, tokens: Tensor) -> Tensor:
        # A padding query sees everything, so that its softmax has something to sum to.
        return (tokens >= 0) | (x.positions < 0)[:, None]

    def note(self, x: AttendInputs, p: Tensor) -> None:
        score = x.notes[1]
        # Slots without a token collect what means nothing: it is gone when a token comes.
        share = score_sums.pooled(p, self.retention)
        if self.retention.score == "last":
            score.copy_(share)
        elif self.retention.score != "vote":
            score.add_(share)

    def attend_many(
        self, x: AttendInputs, read: CacheLayout, stored: Stored, attend: AttendMany
    ) -> tuple[Tensor, Gained]:
        """Many queries against the slots and themselves; `attend` is for those that leave no scores."""
        held, positions, q = stored.tokens, x.positions, x.q
        own = torch.where(positions < 0, -1, positions)[:, None].expand(-1, held.shape[1], -1)
        tokens = torch.cat([held, own], dim=2)
        seen = residual_views.of_slots(x, read, stored)
        k_all = seen.keys
        query_place, place = positions, tokens
        if self.retention.in_cache:
            # New tokens stand after all that were kept.
            query_place = positions - (x.seq_lens - self.retention.tokens).clamp(min=0)[:, None]
            place = torch.cat([ranks(held), query_place[:, None].expand(-1, held.shape[1], -1)], dim=2)
        # Tokens that are seen in several forms are there once for each, one behind the other.
        count = len(seen.forms)
        places = place.repeat(1, 1, count)
        if x.rope:
            q = rotate(q, query_place, *x.rope, form=x.spec.rotary)
            k_all = rotate(k_all, places, *x.rope, form=x.spec.rotary)
        out: Tensor
        gained: Tensor
        columns = score_sums.OP if current().in_blocks else score_sums.attend_columns
        out, gained = columns(
            q,
            k_all,
            seen.values,
            tokens.repeat(1, 1, count),
            positions,
            query_place,
            places,
            replace(x.spec, layout=read).to_json(),
            [residual_views.PAIRS.index(form) for form in seen.forms],
            sinks=x.sinks,
            bias=x.bias,
            leaves=x.leaves,
        )
        return out, (tokens, gained.unflatten(2, (count, -1)).sum(2))

    def keep(self, x: AttendInputs, stored: Stored, gained: Gained | None) -> None:
        assert gained is not None
        layout, positions, (token, score) = x.spec.layout, x.positions, x.notes
        (tokens, shares), last = gained, positions[:, -1:, None]
        scores = scores_after(score, shares, tokens, last, self.retention)
        stay = chosen(tokens, scores, last, token.shape[2], self.retention)
        slots = torch.arange(token.shape[2], device=token.device)[None]
        both = zip(sides(layout, x.k, x.v, x.parts), (stored.keys, stored.values), strict=False)
        for (storage, vectors, mine), old in both:
            _, encoded = residual.settled(storage, vectors, mine, positions)
            residual.append(storage, vectors, mine, positions, x.seq_lens)
            for buffer, before, part in zip(mine, old, encoded, strict=False):
                if x.page_table is None:
                    buffer.copy_(_take(before, part, stay))
                else:
                    paged.write(buffer, x.page_table, slots, _take(before, part, stay))
        token.copy_(tokens.gather(2, stay))
        score.copy_(scores.gather(2, stay))


def slot_for(
    token: Tensor, score: Tensor, position: Tensor, address: sympy.Expr, retention: Scored
) -> Tensor:
    """The slot [B, Hs, 1] of the token at `position` [B, 1, 1]: the next free one, or that of the lowest score."""
    held = token.long()
    candidate = (held >= retention.sinks) & (held <= position - retention.recent)
    value = score / (position - held).clamp(min=1) if retention.score == "mean_age" else score
    value = value.masked_fill(~candidate, float("inf"))
    lowest = value.amin(-1, keepdim=True)
    oldest = held.masked_fill(~candidate | (value > lowest), LATEST).argmin(-1, keepdim=True)
    # Padding has a negative position, and so a slot at the far end.
    slot = evaluate(address, {sy.pos: position, sy.given_up: oldest})
    return torch.remainder(slot, token.shape[2])


def _note(notes: Tensor, slot: Tensor, values: Tensor) -> None:
    """Slot [B, Hs, 1] of each head of `notes` [B, Hs, N] becomes `values`."""
    batch = torch.arange(notes.shape[0], device=notes.device)[:, None, None]
    head = torch.arange(notes.shape[1], device=notes.device)[None, :, None]
    notes.index_put_((batch, head, slot), values)


def _take(old: Tensor, new: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, Hs, N] of old [B, Hkv, N, ...] followed by new [B, Hkv, S, ...]."""
    if is_fp8(old.dtype):  # torch joins no fp8
        return _take(old.view(torch.uint8), new.view(torch.uint8), index).view(old.dtype)
    return residual.take(torch.cat([old, new], dim=2), index)
