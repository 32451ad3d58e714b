"""Answers for retention by positions: what is kept for a query depends on nothing else (`kernels/oracle/kept.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompile.kernels.oracle.kept import kept_keys
from kvcompile.kernels.oracle.retention.hooks import Hooks, Pass, View
from kvcompile.layouts import Retention


class ByPosition(Hooks[Retention]):
    """All queries at once, each over the tokens that are kept for it; positions are the sequence's own."""

    def passes(self, came: Sequence[Pass]) -> Sequence[Pass]:
        return [Pass(0, sum(one.columns for one in came), 0, sum(one.tokens for one in came))]

    def view(self, one: Pass, queries: Tensor, shown: Tensor, held: Tensor | None) -> View:
        index = torch.arange(shown.shape[-1], device=queries.device)
        return View(index, shown & kept_keys(self.retention, queries, index), queries, index)


class InCache(ByPosition):
    """One query after the other, as if the tokens that are kept for it were the whole sequence, and it their last."""

    def passes(self, came: Sequence[Pass]) -> Sequence[Pass]:
        return [Pass(0, 1, token, 1) for token in range(sum(one.tokens for one in came))]

    def view(self, one: Pass, queries: Tensor, shown: Tensor, held: Tensor | None) -> View:
        index = torch.arange(shown.shape[-1], device=queries.device)
        tokens = index[(shown & kept_keys(self.retention, queries, index))[0]]
        places = torch.arange(len(tokens), device=queries.device)
        return View(tokens, torch.ones_like(places, dtype=torch.bool)[None], places[-1:], places)
