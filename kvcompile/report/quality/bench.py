"""Runs jobs: builds the module that each needs from one capture, and gives its memory back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kvcompile import api
from kvcompile.pipeline import Front
from kvcompile.report.estimate import estimate
from kvcompile.report.quality.jobs import Job
from kvcompile.report.quality.needle import retrieval
from kvcompile.report.quality.perplexity import perplexity
from kvcompile.report.quality.report import Memory
from kvcompile.report.quality.settings import Settings
from kvcompile.report.quality.store import Score
from kvcompile.runtime.module import CachedModel
from kvcompile.runtime.parallel.options import Parallel

Tell = Callable[[int, int], None]


class Bench:
    """One model, its tokenizer and a text. The reference's module is kept as long as the bench."""

    def __init__(
        self,
        model: nn.Module,
        front: Front,
        tokenizer: Any,
        ids: Tensor,
        settings: Settings,
        reference: Job,
        parallel: Parallel,
    ):
        """
        ids:       int64 [n], the text
        reference: of the full cache; the perplexity of all others is measured beside it
        """
        self._model, self._front, self._tokenizer = model, front, tokenizer
        self._ids = ids[None].to(front.device)
        self._settings = settings
        self._parallel = parallel
        self._reference_job = reference
        self._reference: CachedModel | None = None
        self._verified: set[str] = set()

    def measure(self, job: Job, tell: Tell) -> Score:
        """Run a job; `tell` is called with (done, in all)."""
        if job is self._reference_job and job.metric == "perplexity":
            return self._perplexity(self._full(), None, job, tell)
        fast = self._build(job)
        try:
            if job.metric == "perplexity":
                return self._perplexity(fast, self._full(), job, tell)
            return retrieval(fast, self._tokenizer, job.asked, job.length, job.asked[0].ask, memory_of, tell)
        finally:
            fast.release()

    def _perplexity(self, fast: CachedModel, full: CachedModel | None, job: Job, tell: Tell) -> Score:
        settings = self._settings
        ids = self._ids[:, : settings.prompt + settings.tokens]
        return perplexity(fast, full, ids, settings.prompt, job.step, memory_of, tell)

    def _full(self) -> CachedModel:
        if self._reference is None:
            self._reference = self._build(self._reference_job)
        return self._reference

    def _build(self, job: Job) -> CachedModel:
        """The job's module; a recipe is verified as it says, the first time."""
        verify = "off" if job.recipe.name in self._verified else job.verify
        recipe = job.recipe.model_copy(update={"verify": verify})
        fast = api.build(self._model, self._front, recipe, parallel=self._parallel)
        self._verified.add(job.recipe.name)
        return fast


def memory_of(fast: CachedModel) -> Memory:
    """The cache as it stands, beside its estimate."""
    tokens = fast.plan.limits.max_tokens
    assert tokens is not None, "every job sets max_tokens"
    return Memory(tokens, fast.cache.nbytes, estimate(fast, batch=1, tokens=tokens).bytes)
