"""The typer application with all commands."""

from __future__ import annotations

import io
import sys

import typer

from kvcompile.cli import calibrate, export, generate, inspect, kernels, quality, recipes, serve, tune

app = typer.Typer(
    name="kvcompile",
    help="Gives any PyTorch decoder the KV cache you choose.\n\n"
    "A recipe (YAML) says what the cache is like; kvcompile traces the model, rewrites its attention onto "
    "that cache, checks the result against the original, and compiles it. Start with:\n\n"
    "  kvcompile recipes list\n\n"
    "  kvcompile generate --recipe int8 --prompt 'Why is the sky blue?'\n\n"
    "  kvcompile estimate --config config.json --recipe int8 --memory 24GiB",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(serve.serve)
app.command()(inspect.explain)
app.command()(inspect.estimate)
app.command()(inspect.passes)
app.command()(quality.quality)
app.command()(recipes.validate)
app.command()(calibrate.calibrate)
app.command()(export.export)
app.command()(export.verify)
app.command()(kernels.kernels)
app.command()(tune.tune)
app.add_typer(recipes.app, name="recipes")


def _version(asked: bool) -> None:
    if asked:
        from kvcompile import __version__

        typer.echo(f"kvcompile {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """What stands before a command."""


def main() -> None:
    """Entry point of `kvcompile`."""
    for stream in (sys.stdout, sys.stderr):
        # What a terminal's encoding lacks (an ASCII one has no "·", and no model's text) is a "?", and no traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()
