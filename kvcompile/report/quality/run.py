"""`quality` from options to a report: check everything, capture once, measure what is not there yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from kvcompile.errors import QualityError
from kvcompile.original.adapters import base_of
from kvcompile.pipeline import understand
from kvcompile.report.quality import digests, haystack
from kvcompile.report.quality import plot as picture
from kvcompile.report.quality.bench import Bench
from kvcompile.report.quality.files import NEEDS_MATPLOTLIB
from kvcompile.report.quality.jobs import Job, load_recipes, plan_jobs
from kvcompile.report.quality.report import NeedleScore, PerplexityScore, QualityReport, RecipeQuality
from kvcompile.report.quality.settings import Settings
from kvcompile.report.quality.store import Score, Store
from kvcompile.report.quality.text import help_topics, tokens_of
from kvcompile.runtime.parallel.group import check_world, rank_of_process
from kvcompile.runtime.parallel.options import Parallel
from kvcompile.util.progress import Progress

log = logging.getLogger(__name__)
_NO_TOKENIZER = "tokenizer: a text must become tokens, and the model has none beside it; give its own"


def run(
    model: nn.Module,
    tokenizer: Any,
    recipes: object,
    text: str | None,
    settings: Settings,
    out: Path | None,
    fresh: bool,
    plot: bool,
    name: str | None,
    tell: Progress,
    parallel: object = None,
) -> QualityReport:
    """See `kvcompile.quality`."""
    over = Parallel.of(parallel)
    if over.size > 1:
        check_world(over)
    first = over.size == 1 or rank_of_process() == 0
    loaded = load_recipes(recipes)
    problems = settings.problems()
    if out is not None and plot and not picture.available():
        problems.append(NEEDS_MATPLOTLIB)
    if tokenizer is None:
        problems.append(
            "tokenizer: a text must become tokens, and the model has none beside it; give its own"
        )
    if problems:
        raise QualityError(problems)
    ids = tokens_of(tokenizer, help_topics() if text is None else text)
    needed = settings.needed()
    if len(ids) < needed:
        raise QualityError(
            [
                f"text: has {len(ids):,} tokens, and {needed:,} are needed (prompt + tokens, or the longest of "
                "needle_tokens): give a longer one, or ask for less"
            ]
        )
    notes: list[str] = []

    def warn(message: str) -> None:
        log.warning(message)
        notes.append(message)

    store = Store(out, warn, writes=first)
    hunted = "needle" in settings.metrics
    asked = {
        (length, ask): haystack.needles(tokenizer, ids, length, ask, settings)
        for length in (settings.needle_tokens if hunted else ())
        for ask in settings.ask
    }
    tell("capture and detect", 0, 1)
    model = base_of(model)
    front = understand(model)
    tell("capture and detect", 1, 1)
    jobs = plan_jobs(model, front, loaded, ids, asked, settings, over)
    bench = Bench(model, front, tokenizer, ids, settings, jobs[0], over)
    scores: list[tuple[Job, Score]] = []
    for number, job in enumerate(jobs, start=1):
        scores.append((job, _finish(job, f"{number}/{len(jobs)} {job.title}", bench, store, fresh, tell)))
    rows = tuple(_row([(job, score) for job, score in scores if job.recipe.name == r.name]) for r in loaded)
    notes += _differences(rows)
    if over.size > 1:
        notes.append(f"over {over.size} ranks ({over}): bytes in the buffers are those of rank 0")
    longest = rows[0].memory.tokens
    if front.max_tokens is not None and longest > front.max_tokens:
        notes.append(f"the model was made for {front.max_tokens:,} tokens, and {longest:,} are measured")
    if hunted and not getattr(tokenizer, "chat_template", None):
        notes.append("the tokenizer has no chat template: questions are put as plain text")
    report = QualityReport(
        model=name or type(model).__name__,
        dtype=jobs[0].plan.dtype,
        text={"tokens": len(ids), "digest": digests.of_tokens(ids)},
        settings=settings.to_dict(),
        versions=digests.versions(),
        rows=rows,
        notes=tuple(notes),
    )
    if out is not None and first:
        report.save(out, plot)
    return report


def check(settings: Settings, out: Path | None, plot: bool, *more: str | None) -> None:
    """What can be told without a model; `more`: problems found elsewhere.

    Raises:
        QualityError: all of them.
    """
    problems = [*settings.problems(), *filter(None, more)]
    if out is not None and plot and not picture.available():
        problems.append(NEEDS_MATPLOTLIB)
    if problems:
        raise QualityError(problems)


def _finish(job: Job, stage: str, bench: Bench, store: Store, fresh: bool, tell: Progress) -> Score:
    """The job's figure: the one that is kept, or a new one, kept."""
    score = None if fresh else store.get(job.key)
    if score is not None:
        tell(f"{stage}, finished before", 1, 1)
        return score
    tell(stage, 0, 1)
    score = bench.measure(job, lambda done, total: tell(stage, done, total))
    store.put(job.key, job.recipe.name, job.metric, score)
    return score


def _row(own: Sequence[tuple[Job, Score]]) -> RecipeQuality:
    plan = own[0][0].plan
    return RecipeQuality(
        recipe=own[0][0].recipe.name,
        layout="; ".join(dict.fromkeys(str(decision.layout) for decision in plan.decisions)),
        bytes_per_token=plan.bytes_per_token,
        perplexity=next((score for _, score in own if isinstance(score, PerplexityScore)), None),
        needles=tuple(score for _, score in own if isinstance(score, NeedleScore)),
    )


def _differences(rows: Sequence[RecipeQuality]) -> list[str]:
    """Caches that are not as large as `estimate` says."""
    return [
        f"{row.recipe}: {row.memory.measured:,} bytes in the buffers, and {row.memory.estimated:,} by estimate"
        for row in rows
        if row.memory.measured != row.memory.estimated
    ]
