"""`kvcompile export` and `kvcompile verify`: artifacts that run without the model, and whether they are right."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

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
    stages,
    waiting,
)
from kvcompile.targets.registry import TARGETS, Target
from kvcompile.util.console import format_bytes

Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Of the target, repeatable: opset=23."),
]


def _target(name: str) -> Target:
    """The name, which the registry has."""
    if name not in TARGETS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, TARGETS))}.")
    return name


@command
def export(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the artifact goes.")],
    target: Annotated[
        Target,
        typer.Option(
            "--target", "-t", parser=_target, metavar=f"[{'|'.join(TARGETS)}]", help="What shall run it."
        ),
    ] = "onnx",
    model: Model = "smollm2",
    recipe: RecipeName = "baseline",
    dtype: Dtype = None,
    settings: Settings = None,
    scales: ScalesFile = None,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a model with the KV cache of a recipe as files that run without it.

    Example: kvcompile export engine/ --target tensorrt --recipe int8 --dtype float16
    """
    overrides = overrides_from(settings, scales)
    own = overrides_from(options)
    with waiting("starting"):
        import kvcompile
        from kvcompile.models import load_model
        from kvcompile.recipe import Recipe

        loaded_recipe = Recipe.load(recipe, **overrides)
    with waiting(f"loading {model}"):
        loaded = load_model(model, dtype)
    with stages() as progress:
        manifest = kvcompile.export(
            loaded.model,
            out,
            target,
            recipe=loaded_recipe,
            tokenizer=loaded.tokenizer,
            progress=progress,
            options=own,
        )
    if json:
        typer.echo(manifest.to_json(), nl=False)
        return
    from rich.table import Table

    table = Table(
        "file", "bytes", title=f"{out}: {manifest.model.architecture}, recipe {manifest.recipe.name}"
    )
    for name, info in manifest.files.items():
        if manifest.tokenizer is None or not name.startswith(f"{manifest.tokenizer}/"):
            table.add_row(name, format_bytes(info.bytes))
    show(table)
    for check in manifest.checks:
        typer.echo(
            f"{check.session} agrees with the oracle: error {check.error:.1e} of {check.budget:.1e} allowed"
        )
    if not manifest.checks:
        typer.echo("not run here: kvcompile verify compares it with the model where it can run")


@command
def verify(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The folder of an artifact.")],
    model: Model = "smollm2",
    scales: ScalesFile = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run an artifact and compare it with the model that it was made of.

    Example: kvcompile verify engine/ --model smollm2
    """
    with waiting("starting"):
        from kvcompile.models import load_model
        from kvcompile.targets.manifest import Manifest
        from kvcompile.targets.verify import verify_artifact

        manifest = Manifest.read(artifact)
    with waiting(f"loading {model}"):
        loaded = load_model(model, manifest.model.dtype)
    with waiting(f"running {artifact}"):
        outcomes = verify_artifact(artifact, loaded.model, scales=scales)
    if json:
        rows: list[dict[str, Any]] = [
            {"session": o.session, "reason": o.reason}
            if o.check is None
            else {
                "session": o.check.name,
                "error": o.check.error,
                "budget": o.check.budget,
                "tokens": o.check.tokens,
            }
            for o in outcomes
        ]
        typer.echo(jsonlib.dumps(rows, indent=1))
        return
    for outcome in outcomes:
        typer.echo(
            f"{outcome.session}: not run: {outcome.reason}" if outcome.check is None else str(outcome.check)
        )
