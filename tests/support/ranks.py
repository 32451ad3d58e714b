"""Models over ranks and stages in one process: divided, run in step, compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcompile.passes.shard.shard import Sharding, localized
from kvcompile.passes.stages.stage import Staging
from kvcompile.pipeline import Front, divided, plan_for, rewrite, understand
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.verify import Check, verify
from kvcompile.verify.cached import cached_run

TOKENS = 32
CHUNKS = (11, 1, 1, 7, 1, 1, 5)


@dataclass(frozen=True)
class OverRanks:
    """A model over ranks, not run yet."""

    model: nn.Module
    front: Front
    plan: Plan

    @property
    def sharding(self) -> Sharding:
        assert self.front.sharding is not None
        return self.front.sharding

    @property
    def staging(self) -> Staging:
        assert self.front.staging is not None
        return self.front.staging

    def verified(self) -> tuple[Check, ...]:
        """The ranks' graphs in step, against the oracle and the original, within the budgets of `verify`."""
        return verify(self.model, self.front, self.plan, "quick")

    def logits(self, ids: Tensor) -> Tensor:
        """Of all ranks together, in a prompt, single tokens and chunks."""
        rewritten, constants = rewrite(self.front, self.plan)
        pads = torch.zeros(len(ids), dtype=torch.int64)
        return cached_run(self.front, self.plan, rewritten, constants, ids, pads, CHUNKS).logits

    def share(self, rank: int = 0) -> float:
        """A rank's part of the cache's bytes."""
        return localized(self.plan, self.sharding, rank).bytes(1) / self.plan.bytes(1)


def over_ranks(
    model: nn.Module, ranks: int, recipe: object = "baseline", stages: int = 1, **overrides: Any
) -> OverRanks:
    """`model` over ranks of each of so many stages, with a recipe."""
    front = understand(model)
    options = {"max_tokens": TOKENS, "max_batch": 2, "compile": {"mode": "none"}} | overrides
    plan = plan_for(front, Recipe.load(recipe, **options))
    return OverRanks(model, divided(front, plan, ranks, stages), plan)
