"""What is to be measured, planned before anything runs: one job for each figure of a recipe.

A job's cache is exactly as long as what it must hold, so that a recipe's bytes and budgets are those of the text that
is measured. Its key is a hash of all that the figure depends on: weights, tokens, plan, compile mode, code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from kvcompile.errors import QualityError, RecipeError
from kvcompile.pipeline import Front, plan_for
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.report.quality import REFERENCE, digests, haystack
from kvcompile.report.quality.feed import step_of
from kvcompile.report.quality.haystack import Needle
from kvcompile.report.quality.settings import Settings
from kvcompile.runtime.parallel.options import Parallel


@dataclass(frozen=True)
class Job:
    """One figure.

    recipe: sized, with the compile mode it runs in and without verification; `verify`: what it says itself
    step:   tokens fed at a time
    length: of the text that the needles `asked` are hidden in; 0 for perplexity
    key:    what the result is kept under
    """

    recipe: Recipe
    verify: Literal["quick", "thorough", "off"]
    plan: Plan
    metric: str
    step: int
    length: int
    asked: tuple[Needle, ...]
    key: str

    @property
    def title(self) -> str:
        """For people."""
        what = f"needles in {self.length:,} tokens, asked {self.asked[0].ask}" if self.asked else self.metric
        return f"{self.recipe.name}: {what}"


def load_recipes(given: object) -> list[Recipe]:
    """The reference, then the others.

    Raises:
        RecipeError: the problems of all of them; QualityError: several of one name.
    """
    sources = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    problems: list[str] = []
    loaded = []
    for source in sources:
        try:
            loaded.append(Recipe.load(source))
        except RecipeError as error:
            problems += [f"{error.source}: {problem}" for problem in error.problems]
    if problems:
        raise RecipeError("recipes", problems)
    reference = Recipe.load(REFERENCE)
    recipes = [reference, *(recipe for recipe in loaded if recipe != reference)]
    names = [recipe.name for recipe in recipes]
    twice = ", ".join(sorted({name for name in names if names.count(name) > 1}))
    if twice:
        raise QualityError(
            [f"recipes: several are named {twice}: give each a `name` of its own for the table"]
        )
    return recipes


def plan_jobs(
    model: nn.Module,
    front: Front,
    recipes: Sequence[Recipe],
    ids: Tensor,
    asked: Mapping[tuple[int, str], tuple[Needle, ...]],
    settings: Settings,
    parallel: Parallel,
) -> list[Job]:
    """All jobs, recipe by recipe; the first one is of the reference.

    Args:
        ids: int64 [n], the text.
        asked: needles by the length of their text and the place of the question.

    Raises:
        PlanError: a recipe that does not fit the model.
        QualityError: a step that a recipe cannot be fed in, or limits that are too small; all of them.
    """
    same = [digests.of_model(model), front.device.type, digests.versions()]
    if parallel.size > 1:  # what a rank's cache takes is another figure
        same.append(str(parallel))
    jobs: list[Job] = []
    problems: list[str] = []
    for recipe in recipes:
        try:
            if "perplexity" in settings.metrics:
                scored = settings.prompt + settings.tokens
                of_text = [digests.of_tokens(ids[:scored]), settings.prompt, jobs[0].key if jobs else None]
                jobs.append(_job(front, recipe, "perplexity", scored, 0, (), settings, [same, of_text]))
            for (length, _), needles in asked.items():
                most = max(needle.tokens for needle in needles)
                of_needles = haystack.digest(needles)
                jobs.append(
                    _job(front, recipe, "needle", most, length, needles, settings, [same, of_needles])
                )
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise QualityError(problems)
    return jobs


def _job(
    front: Front,
    recipe: Recipe,
    metric: str,
    tokens: int,
    length: int,
    asked: tuple[Needle, ...],
    settings: Settings,
    depends: list[Any],
) -> Job:
    """A job with a cache of `tokens`; `depends`: what else its figure depends on.

    Raises:
        ValueError: the recipe's own limit is less, or it cannot be fed in the step that was asked for.
    """
    limit = recipe.runtime.max_tokens
    if limit is not None and limit < tokens:
        more = f" ({length:,} and the question)" if length else ""
        raise ValueError(
            f"recipe {recipe.name!r}: runtime.max_tokens is {limit:,}, and {tokens:,} tokens{more} are measured: raise "
            "it, or ask for less"
        )
    sized = Recipe.load(recipe, max_tokens=tokens, verify="off")
    plan = plan_for(front, sized)
    step = step_of(plan, settings.step if metric == "perplexity" else "auto")
    mode = settings.compile
    if mode == "auto":  # compiling takes longer than the few steps of a text in pieces, or of an answer
        mode = "default" if metric == "perplexity" and step == 1 else "none"
    sized = Recipe.load(sized, compile={"mode": mode})
    key = digests.short([metric, plan.digest(), mode, step, *depends])
    return Job(sized, recipe.verify, plan, metric, step, length, asked, key)
