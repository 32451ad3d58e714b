"""Retention by attention received: a budget of tokens, of which those stay that queries have looked at most.

    budget = sinks + heavy + recent
    kept   = the first `sinks` tokens, the last `recent`, and of the others the `heavy` with the highest score

| method | score of a token | source |
|---|---|---|
| H2O | the probability it got, summed over queries (`sum`), or that over its age (`mean_age`) | Zhang et al. 2023, 4 |
| TOVA | the probability that the last query gave it (`last`), over all heads | Oren et al. 2024, 3 |
| SnapKV | what the last `rows` queries of a prompt gave it, smoothed over neighbours (`vote`) | Li et al. 2024, 4 |

A query's probabilities over the heads of a group are pooled before they count; granularity `layer` pools over the KV
heads too, and all of them keep the same tokens. Scores are kept per slot, never per query head.

One new token takes a slot before it attends: where all are taken, that of the token outside sinks and recents with
the lowest score (of equal ones the oldest). So a step sees `budget` tokens with itself. Many tokens at once attend to
what was kept and to themselves, and what stays is chosen after. So here, unlike in other retentions, a result
depends on how a prompt is cut: `prefill: full` never cuts it, `bounded` cuts it at runtime.prefill_chunk, and never
has more than budget + prefill_chunk tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import sympy
import torch

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.buffer import BufferSpec
from kvcompile.layouts.retention.hooks import Hooks

Method = Literal["h2o", "tova", "snapkv"]
Score = Literal["sum", "mean_age", "last", "vote"]
Pooling = Literal["sum", "mean", "max"]
Granularity = Literal["kv_head", "layer"]
# Per slot: the position of its token (int32) and its score (float32).
STATE_BYTES = 8


@dataclass(frozen=True)
class Scored(Hooks):
    """`sinks` + `heavy` + `recent` tokens; see the module.

    recent:  newest tokens that stay whatever their score, the query's own among them
    rows:    how many of the last queries of a pass over many tokens count; 0: all
    smooth:  neighbours (in the order of positions) over which votes are averaged
    prefill: whether a prompt is one pass ("full") or cut into chunks ("bounded")
    """

    sinks: int
    heavy: int
    recent: int
    method: Method = "h2o"
    score: Score = "sum"
    pooling: Pooling = "mean"
    granularity: Granularity = "kv_head"
    rows: int = 0
    smooth: int = 1
    prefill: Literal["full", "bounded"] = "full"
    positions: Literal["original", "in_cache"] = "original"
    kind: Literal["scored"] = "scored"

    by_score = True
    placement = "slots"
    num_notes = 2
    followed = "slots.token"

    @property
    def window(self) -> None:
        """No token is hidden by its position alone."""
        return None

    @property
    def in_cache(self) -> bool:
        """Whether positions count from the start of the cache instead of the sequence."""
        return self.positions == "in_cache"

    @property
    def tokens(self) -> int:
        """The budget as a number."""
        return self.sinks + self.heavy + self.recent

    @property
    def name(self) -> str:
        return self.method

    @property
    def whole_prompts(self) -> bool:
        return self.prefill == "full"

    @property
    def state_heads(self) -> sympy.Expr:
        """How many heads note token and score of each slot: one for all, or each KV head, H."""
        return sy.H if self.granularity == "kv_head" else sympy.Integer(1)

    def notes(self, num_kv_heads: int) -> tuple[BufferSpec, ...]:
        shape = (int(self.state_heads.subs(sy.H, num_kv_heads)), self.tokens)
        return (
            BufferSpec("slots.token", shape, torch.int32),
            BufferSpec("slots.score", shape, torch.float32),
        )

    def bytes_per_slot(self) -> sympy.Expr:
        return STATE_BYTES * self.state_heads

    def budget(self) -> sympy.Expr:
        return sympy.Integer(self.tokens)

    def small(self, sinks: int, window: int, heavy: int) -> Scored:
        return replace(
            self,
            sinks=min(self.sinks, sinks),
            heavy=min(self.heavy, heavy),
            recent=min(self.recent, window),
            rows=min(self.rows, window),
        )

    def __str__(self) -> str:
        parts = [
            f"{self.method} "
            + " + ".join(
                f"{count} {name}"
                for count, name in ((self.sinks, "sinks"), (self.heavy, "heavy"), (self.recent, "recent"))
                if count
            )
        ]
        if self.method == "h2o":
            parts.append(self.score)
        parts += ["per layer"] if self.granularity == "layer" else []
        parts += ["bounded prefill"] if self.prefill == "bounded" else []
        parts += ["in_cache"] if self.in_cache else []
        return ", ".join(parts)
