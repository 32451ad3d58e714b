"""`kvcompile explain`, `estimate` and `passes`: what a recipe does to a model, what it costs, and what does it."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from kvcompile.cli.common import (
    Debug,
    Dtype,
    Json,
    Model,
    RecipeName,
    ScalesFile,
    Settings,
    command,
    overrides_from,
    show,
    waiting,
)


@command
def explain(
    model: Model = "smollm2",
    recipe: RecipeName = "baseline",
    dtype: Dtype = None,
    json: Json = False,
    full: Annotated[bool, typer.Option("--full", help="One row per layer, with source lines.")] = False,
    settings: Settings = None,
    scales: ScalesFile = None,
    tensor: Annotated[int, typer.Option(min=1, help="What each of so many ranks would have.")] = 1,
    debug: Debug = False,
) -> None:
    """Show what a recipe does to each layer of a model, why, and what it costs. Nothing is compiled.

    Example: kvcompile explain --model random:config.json --recipe int4
    """
    overrides = overrides_from(settings, scales)
    with waiting("starting"):
        from kvcompile.models import load_model
        from kvcompile.recipe import Recipe
        from kvcompile.report.explain import explain as run

        loaded_recipe = Recipe.load(recipe, **overrides)
    with waiting(f"loading {model}"):
        loaded = load_model(model, dtype)
    with waiting(f"tracing {model}"):
        explanation = run(loaded.model, loaded_recipe, parallel={"tensor": tensor})
    if json:
        typer.echo(explanation.to_json())
        return
    from rich.console import Group

    show(Group(*explanation.parts(full)))


@command
def estimate(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model as for generate; not loaded.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="A config.json, or a folder that has one.")
    ] = None,
    recipe: RecipeName = "baseline",
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences; 1 by default.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Per sequence; what the model was made for by default.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory for the cache alone, such as 24GiB: say what fits in it.")
    ] = None,
    dtype: Dtype = None,
    json: Json = False,
    settings: Settings = None,
    scales: ScalesFile = None,
    debug: Debug = False,
) -> None:
    """Say what a recipe's cache costs for a model, from its config alone: no weights are read.

    Example: kvcompile estimate --config Llama-3.1-8B/config.json --recipe int8 --tokens 32768 --memory 24GiB
    """
    if model is not None and config is not None:
        raise typer.BadParameter("give --model or --config, not both")
    overrides = overrides_from(settings, scales)
    with waiting("reading the config"):
        from kvcompile.report.estimate import estimate as run

        cost = run(
            config or model or "smollm2",
            recipe,
            batch=batch,
            tokens=tokens,
            memory=memory,
            dtype=dtype,
            **overrides,
        )
    if json:
        typer.echo(jsonlib.dumps(cost.to_dict(), indent=2))
    else:
        show(cost)


@command
def passes(json: Json = False, debug: Debug = False) -> None:
    """List the passes in the order in which a model goes through them, and which of them may be left out.

    KVCOMPILE_DISABLE=name,name leaves out those that may be, to bisect; KVCOMPILE_DUMP=dir writes what each leaves.

    Example: kvcompile passes
    """
    from dataclasses import asdict

    from kvcompile.passes.table import PASSES
    from kvcompile.util.console import table

    if json:
        typer.echo(jsonlib.dumps([asdict(each) for each in PASSES], indent=2))
        return
    rows = table("pass", "what it does", "file", "optional", grow=("what it does",))
    for each in PASSES:
        rows.add_row(each.name, each.does, each.file, "yes" if each.optional else "")
    show(rows)
