"""`kvcompile.quality`: what caches cost in quality, measured on a text; see the command of the same name.

| file | what it does |
|---|---|
| `settings.py` | what is measured, checked |
| `feed.py` | a text into a model with a cache, piece by piece |
| `perplexity.py` | perplexity, KL and agreement with the full cache, teacher-forced |
| `haystack.py`, `needle.py` | facts hidden in a text, and whether they are found |
| `store.py`, `digests.py` | finished measurements, kept and found again |
| `run.py` | all of it for several recipes, with one capture |
| `report.py`, `table.py`, `plot.py` | the figures, as data, as tables and as a picture |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompile.util.progress import Progress, told

# Light on purpose: torch and transformers are imported when quality() is called.
if TYPE_CHECKING:
    from torch import nn

    from kvcompile.report.quality.report import QualityReport

REFERENCE = "baseline"  # the recipe that all others are compared with: every token, in the model's dtype


def quality(
    model: nn.Module,
    tokenizer: Any,
    recipes: Sequence[object],
    text: str | None = None,
    *,
    metrics: str | Sequence[str] = ("perplexity", "needle"),
    prompt: int = 512,
    tokens: int = 3072,
    step: int | str = "auto",
    needle_tokens: int | Sequence[int] = (768,),
    depths: float | Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    needles: int = 3,
    ask: str | Sequence[str] = ("after", "before"),
    seed: int = 0,
    compile: str = "auto",
    out: str | Path | None = None,
    fresh: bool = False,
    plot: bool = True,
    name: str | None = None,
    parallel: object = None,
    progress: Progress | None = None,
) -> QualityReport:
    """Measure what the caches of `recipes` cost in quality, beside a full cache ("baseline", always added).

    Args:
        model: what `optimize` takes; captured once for all recipes.
        tokenizer: the model's, of `transformers`. With a chat template, needles are asked for in a chat.
        recipes: what `optimize` takes, each with a name of its own.
        text: to predict and to hide needles in; default: the topics of Python's help(), in English.
        metrics: "perplexity", "needle", or both.
        prompt: tokens read before the first one that is scored.
        tokens: tokens that are scored, the last one not fed. The text must have prompt + tokens.
        step: tokens fed at a time behind the prompt; "auto": single ones where a recipe's result depends on
            it, else 256.
        needle_tokens: lengths of the text that a needle is hidden in.
        depths: where it is hidden, from 0 (the start) to 1 (the end).
        needles: how many at each depth, each in a stretch of the text of its own.
        ask: whether the question comes "after" the text, "before" it, or both apart.
        seed: of the stretches, cities and numbers.
        compile: one of the recipes' modes for every recipe, "none" to run graphs as they are; "auto": "default"
            where a text is read token by token, else "none".
        out: a folder: finished measurements are kept in it and found again, and quality.json, quality.md and
            quality.png are written at the end. None: nothing is kept.
        fresh: measure again what the folder has.
        plot: whether the picture is made, which needs matplotlib.
        name: of the model, in reports; default: its class.
        parallel: as `optimize` takes it: all ranks make the same call, and rank 0 writes. Bytes are then rank 0's.
        progress: called as progress(stage, done, total); None: as `optimize` shows it.

    Raises:
        QualityError: what was asked cannot be measured: all problems at once.
        RecipeError, ModelError, PlanError: as `optimize`. All of these before anything is measured.
        VerificationError, CompileError: as `optimize`, when the recipe's turn comes. What is finished is kept.
    """
    from kvcompile.report.quality.run import run
    from kvcompile.report.quality.settings import Settings

    settings = Settings(
        metrics=_all(metrics),
        prompt=prompt,
        tokens=tokens,
        step=step,
        needle_tokens=_all(needle_tokens),
        depths=_all(depths),
        needles=needles,
        ask=_all(ask),
        seed=seed,
        compile=compile,
    )
    folder = None if out is None else Path(out)
    with told(progress) as tell:
        return run(model, tokenizer, recipes, text, settings, folder, fresh, plot, name, tell, parallel)


def _all(value: Any) -> tuple[Any, ...]:
    """One value stands for itself: ask="after"."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


__all__ = ["REFERENCE", "quality"]
