"""`kvcompile recipes list | show` and `kvcompile validate`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcompile.cli.common import Debug, command, show, stderr
from kvcompile.errors import RecipeError

app = typer.Typer(
    help="The recipes that come with kvcompile.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("list")
@command
def list_recipes(debug: Debug = False) -> None:
    """List the shipped recipes, one line each."""
    from kvcompile.recipe import load_recipe, shipped_recipes
    from kvcompile.util.console import table

    rows = table("recipe", "what it does")
    for name in shipped_recipes():
        rows.add_row(f"[bold]{name}[/bold]", load_recipe(name).description)
    show(rows)


@app.command("show")
@command
def show_recipe(
    name: Annotated[str, typer.Argument(help="One of 'kvcompile recipes list'.")], debug: Debug = False
) -> None:
    """Print a shipped recipe's YAML: a start for your own."""
    from kvcompile.recipe import shipped_recipes, shipped_text
    from kvcompile.recipe.load import names_like

    if name.removesuffix(".yaml") not in shipped_recipes():
        raise RecipeError(name, [f"no shipped recipe of that name; {names_like(name)}"])
    typer.echo(shipped_text(name), nl=False)


@command
def validate(
    files: Annotated[
        list[str], typer.Argument(help="YAML files, or names of shipped recipes.", metavar="FILE...")
    ],
    debug: Debug = False,
) -> None:
    """Check recipes and print every problem of every file; exits 1 if there is any.

    Example: kvcompile validate my_recipe.yaml other.yaml
    """
    from kvcompile.recipe import load_recipe

    errors: list[RecipeError] = []
    for file in files:
        try:
            recipe = load_recipe(file)
        except RecipeError as error:
            errors.append(error)
            stderr().print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        else:
            typer.echo(f"{file}: ok ({recipe.name})")
    if errors:
        if debug:
            raise ExceptionGroup("recipes", errors)
        raise typer.Exit(1)
