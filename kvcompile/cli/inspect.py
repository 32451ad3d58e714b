"""`kvcompile explain`, `estimate` and `passes`: what a recipe does to a model, what it costs, and what does it."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from kvcompile.report.estimate.cluster import ClusterEstimate


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
    stages: Annotated[int, typer.Option(min=1, help="What each of so many stages would have.")] = 1,
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
        explanation = run(loaded.model, loaded_recipe, parallel={"tensor": tensor, "stages": stages})
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
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Count weights, too, on so many devices, and bound the speed of decoding."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Of which kind: a100, h100, h200, b200, l4, l40s, rtx4090, rtx5090; h100 by default."
        ),
    ] = None,
    parallel: Annotated[
        list[str] | None,
        typer.Option(
            help="tensor=8 or stages=2, repeatable: devices of one replica; the others are more replicas."
        ),
    ] = None,
    json: Json = False,
    settings: Settings = None,
    scales: ScalesFile = None,
    debug: Debug = False,
) -> None:
    """Say what a recipe's cache costs for a model, from its config alone: no weights are read.

    With --devices, --recipe all compares the shipped ones, and --memory is that of one device.

    Example: kvcompile estimate --config Llama-3.1-8B/config.json --recipe int8 --tokens 32768 --memory 24GiB

    Example: kvcompile estimate --config Llama-3.1-70B --recipe all --devices 8 --parallel tensor=8 --tokens 32768
    """
    if model is not None and config is not None:
        raise typer.BadParameter("give --model or --config, not both")
    overrides = overrides_from(settings, scales)
    source = config or model or "smollm2"
    if devices is not None:
        with waiting("reading the config"):
            found = _on_devices(
                source,
                recipe,
                device or "h100",
                memory,
                devices,
                _sizes(parallel),
                batch,
                tokens,
                dtype,
                overrides,
            )
        if json:
            typer.echo(jsonlib.dumps(found.to_dict(), indent=2))
        else:
            show(found)
        return
    for name, given in (("parallel", parallel), ("device", device), ("recipe all", recipe == "all")):
        if given:
            raise typer.BadParameter(f"--{name} is for --devices: say how many there are")
    with waiting("reading the config"):
        from kvcompile.report.estimate import estimate as run

        cost = run(
            source,
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


def _sizes(parallel: list[str] | None) -> dict[str, int]:
    """tensor=8, stages=2 as a dict."""
    found = {}
    for each in parallel or []:
        name, equals, size = each.partition("=")
        if name not in ("tensor", "stages") or not equals or not size.isdecimal():
            raise typer.BadParameter(f"--parallel: expected tensor=8 or stages=2, got {each!r}")
        found[name] = int(size)
    return found


def _on_devices(
    source: str,
    recipe: str,
    device: str,
    memory: str | None,
    devices: int,
    parallel: dict[str, int],
    batch: int | None,
    tokens: int | None,
    dtype: str | None,
    overrides: dict[str, Any],
) -> ClusterEstimate:
    from kvcompile.recipe import shipped_recipes
    from kvcompile.report.estimate.cluster import estimate_cluster
    from kvcompile.util.machines import machine

    # One that chooses for a memory budget would be one of the others.
    names = [name for name in shipped_recipes() if name != "auto"] if recipe == "all" else [recipe]
    return estimate_cluster(
        source,
        names,
        machine(device, memory),
        devices=devices,
        parallel=parallel,
        batch=batch or 1,
        tokens=tokens,
        dtype=dtype,
        **overrides,
    )


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
