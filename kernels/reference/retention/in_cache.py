"""Answers for retention by positions that count from the start of the cache (StreamingLLM).

The slots are those of any retention by positions. What differs is where queries and keys stand: RoPE and biases go by
the place of a token among those that are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import residual_views
from kvcompile.kernels.reference.attend_many import final, raw, visible
from kvcompile.kernels.reference.retention.by_position import ByPosition
from kvcompile.kernels.reference.retention.hooks import AttendMany
from kvcompile.kernels.reference.score_mod import applied, modified
from kvcompile.kernels.reference.scores import probabilities
from kvcompile.kernels.reference.slots import Stored
from kvcompile.kernels.shared.rope import rotate
from kvcompile.layouts import CacheLayout


class InCache(ByPosition):
    """The first tokens and the newest, with positions 0, 1, 2, .. in the cache."""

    def places(self, x: AttendInputs, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Only one query: every key can be turned to its place in the cache."""
        sinks, window = self.retention.sinks, self.retention.window
        assert window is not None
        evicted = (x.new_lens - (sinks + window)).clamp(min=0)[:, None]
        return x.positions - evicted, torch.where(tokens < sinks, tokens, tokens - evicted)

    def attend_many(
        self, x: AttendInputs, read: CacheLayout, stored: Stored, attend: AttendMany
    ) -> tuple[Tensor, None]:
        """`attend` is for positions of which a token has one; here it has several."""
        return self._attend(x, *residual_views.seen(x, read, stored)), None

    def _attend(
        self, x: AttendInputs, k: Tensor, v: Tensor, key_positions: Tensor, allowed: Tensor | None
    ) -> Tensor:
        """x.q [B, Hq, S, D] against k [B, Hkv, T, D], v [B, Hkv, T, Dv] at key_positions [B, T] -> [B, Hq, S, Dv].

        Counted in the cache, a sink stands nearer to late queries than its own position says: sinks and the rest
        have their distances from different places. Only distances matter to RoPE and to a relative bias, so the
        rest may be counted from any base; the oldest live token keeps the table short.
        """
        spec, q, positions = x.spec, x.q, x.positions
        sinks, window = self.retention.sinks, self.retention.window
        assert window is not None
        budget = sinks + window
        seen = visible(x, key_positions, allowed)
        base = (x.seq_lens - budget).clamp(min=0)[:, None]
        capped = positions.clamp(max=budget - 1)
        if x.rope:

            def turn(vectors: Tensor, places: Tensor) -> Tensor:
                return rotate(vectors, places, *x.rope, form=spec.rotary)

            scores = raw(turn(q, positions - base), turn(k, key_positions - base))
            to_sinks = raw(turn(q, capped), turn(k, key_positions))
        else:
            scores = to_sinks = raw(q, k)
        is_sink = ((key_positions >= 0) & (key_positions < sinks))[:, None, None, None]
        near = final(to_sinks, capped, key_positions, spec, x.bias)
        scores = torch.where(is_sink, near, final(scores, positions, key_positions, spec, x.bias))
        heads = (k.shape[1], q.shape[1] // k.shape[1])
        mod = applied(spec.score.mod, positions, key_positions, heads, x.leaves)
        to_near = applied(spec.score.mod, capped, key_positions, heads, x.leaves)
        if mod is None or to_near is None:
            p = modified(None, scores, seen[:, :, None], x.sinks)
        else:
            # By distance, which for sinks is another one.
            scores = torch.where(is_sink, to_near.scores(scores), mod.scores(scores))
            shown, shown_near = mod.seen(), to_near.seen()
            seen = seen[:, :, None]
            if shown is not None and shown_near is not None:
                seen = seen & torch.where(is_sink, shown_near, shown)
            p = mod.weights(probabilities(scores.masked_fill(~seen, float("-inf")), x.sinks))
        out: Tensor = torch.matmul(p.flatten(2, 3), v.float())
        return out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype)
