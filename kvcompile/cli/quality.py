"""`kvcompile quality`: perplexity, KL, needles and bytes of several recipes, in one table and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvcompile.cli.common import (
    Debug,
    Dtype,
    Json,
    Model,
    Settings,
    command,
    on_ranks,
    overrides_from,
    show,
    stderr,
    waiting,
)
from kvcompile.errors import QualityError
from kvcompile.util.progress import Progress, taken

Number = TypeVar("Number", int, float)


class Ask(StrEnum):
    AFTER = "after"
    BEFORE = "before"
    BOTH = "both"


class Compile(StrEnum):
    AUTO = "auto"
    NONE = "none"
    DEFAULT = "default"


@command
def quality(
    model: Model = "smollm2",
    recipes: Annotated[
        str,
        typer.Option(
            "--recipes", "-r", help="Names and YAML files with commas between, or all (shipped ones)."
        ),
    ] = "all",
    text: Annotated[
        Path | None, typer.Option("--text", "-t", help="A text file; Python's help() topics by default.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder of the results; what is finished in it is not run again."),
    ] = Path("quality"),
    metrics: Annotated[str, typer.Option(help="perplexity, needle, or both.")] = "perplexity,needle",
    prompt: Annotated[int, typer.Option(help="Tokens read before the first that is scored.")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens scored.")] = 3072,
    step: Annotated[
        str, typer.Option(help="Tokens fed at a time; auto: one where it makes a difference, else 256.")
    ] = "auto",
    needle_tokens: Annotated[
        str, typer.Option(help="Lengths of the texts that needles are hidden in.")
    ] = "768",
    depths: Annotated[str, typer.Option(help="Where, from 0 (start) to 1 (end).")] = "0,0.25,0.5,0.75,1",
    needles: Annotated[int, typer.Option(help="How many at each depth.")] = 3,
    ask: Annotated[Ask, typer.Option(help="Where the question stands.")] = Ask.BOTH,
    seed: Annotated[int, typer.Option(help="Of needles and their places.")] = 0,
    compile: Annotated[
        Compile, typer.Option(help="auto compiles recipes that read token by token.")
    ] = Compile.AUTO,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Dtype = None,
    settings: Settings = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what the folder has.")] = False,
    no_plot: Annotated[
        bool, typer.Option("--no-plot", help="Without the picture, which needs matplotlib.")
    ] = False,
    tensor: Annotated[
        int,
        typer.Option(min=1, help="Ranks that each have a part of the model; start as many with torchrun."),
    ] = 1,
    stage_count: Annotated[
        int,
        typer.Option("--stages", min=1, help="Stages that each have a part of the layers; one process each."),
    ] = 1,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what caches cost in quality: perplexity, KL, needles found, and bytes, beside the full cache.

    Writes quality.json, quality.md and quality.png (quality against memory) to a folder. Stop it whenever you like:
    called again, it goes on where it was.

    Example: kvcompile quality --recipes int8,int4,kivi2,streaming --out quality
    Over ranks: torchrun --nproc-per-node 3 -m kvcompile.cli quality --tensor 3
    """
    overrides = overrides_from(settings)
    lengths, places = _numbers("--needle-tokens", needle_tokens, int), _numbers("--depths", depths, float)
    if step != "auto" and not step.isdecimal():
        raise typer.BadParameter(f"--step: expected auto or a whole number, got {step!r}")
    with waiting("starting"):
        from kvcompile.models import load_model
        from kvcompile.recipe import Recipe, shipped_recipes
        from kvcompile.report.quality import REFERENCE
        from kvcompile.report.quality.run import check, run
        from kvcompile.report.quality.settings import Settings as What
        from kvcompile.report.quality.text import read_text
        from kvcompile.runtime.parallel.group import rank_of_process

        what = What(
            metrics=tuple(_words(metrics)),
            prompt=prompt,
            tokens=tokens,
            step=step if step == "auto" else int(step),
            needle_tokens=tuple(lengths),
            depths=tuple(places),
            needles=needles,
            ask=("after", "before") if ask is Ask.BOTH else (ask.value,),
            seed=seed,
            compile=compile.value,
        )
        # The reference is always there, without --set; auto takes one of the others.
        shipped = [name for name in shipped_recipes() if name not in (REFERENCE, "auto")]
        names = shipped if recipes.strip() == "all" else _words(recipes)
        if not names:
            raise QualityError(
                [f"recipes: expected names with commas between, or all; got {recipes!r} (baseline always is)"]
            )
        loaded_recipes = [Recipe.load(name, **overrides) for name in names]
        words = None if text is None else read_text(text)
        check(what, out, not no_plot)  # before the model loads
    parallel, device = on_ranks(tensor, device, stage_count)
    with waiting(f"loading {model}"):
        loaded = load_model(model, dtype, device)
    try:
        with bars() as progress:
            report = run(
                loaded.model,
                loaded.tokenizer,
                loaded_recipes,
                words,
                what,
                out,
                fresh,
                not no_plot,
                loaded.name,
                progress,
                parallel,
            )
    except KeyboardInterrupt:
        stderr().print(f"what is finished is in {out}; the same command goes on from there", soft_wrap=True)
        raise
    if parallel is not None and rank_of_process():
        return
    if json:
        typer.echo(report.to_json(), nl=False)
    else:
        show(report)
    stderr().print(f"written to {out}", style="dim", highlight=False, soft_wrap=True)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(word) for word in _words(text)]
    except ValueError:
        raise typer.BadParameter(f"{option}: expected numbers with commas between, got {text!r}") from None


@contextmanager
def bars() -> Iterator[Progress]:
    """A bar for what runs now, and a line for each measurement that is finished; on stderr."""
    from rich import progress as rich
    from rich.markup import escape

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeElapsedColumn(),
    )
    with taken(), rich.Progress(*columns, console=stderr(), transient=True) as bars:
        tasks: dict[str, rich.TaskID] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(escape(stage), total=total)
            bars.update(tasks[stage], completed=done, total=total)
            if done >= total:
                elapsed = bars.tasks[bars.task_ids.index(tasks[stage])].elapsed or 0.0
                bars.console.print(f"{escape(stage)}  {elapsed:.0f} s", style="dim", highlight=False)
                bars.remove_task(tasks.pop(stage))

        yield progress
