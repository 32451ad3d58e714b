"""A command that is added by its function and its line is in the help, runs, and fails as the others do.

It does what the section "Add a command" of CONTRIBUTING.md says, and nothing else.
"""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.cli.common import Debug, RecipeName, Settings, command, overrides_from
from kvcompile.errors import RecipeError


@command
def digest(
    recipe: RecipeName = "baseline",
    short: Annotated[bool, typer.Option("--short", help="Eight characters.")] = False,
    settings: Settings = None,
    debug: Debug = False,
) -> None:
    """Print the digest of a recipe.

    Example: kvcompile digest --recipe int8
    """
    from kvcompile.recipe import load_recipe

    found = load_recipe(recipe, **overrides_from(settings)).digest()
    typer.echo(found[:8] if short else found)


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line in `kvcompile/cli/app.py`, taken back after the test."""
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    app.command()(digest)


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)  # a message, and no traceback
    return result.output


def test_it_is_in_the_help_and_has_its_own() -> None:
    assert "digest" in run("--help") and "Print the digest of a recipe." in run("--help")
    own = run("digest", "--help")
    assert "Example: kvcompile digest --recipe int8" in own
    assert all(option in own for option in ("--recipe", "--short", "--set", "--debug"))


def test_it_runs_with_its_own_options_and_the_shared_ones() -> None:
    whole = run("digest", "--recipe", "int8").strip()
    assert len(whole) > 8 and run("digest", "-r", "int8", "--short").strip() == whole[:8]
    assert run("digest", "-r", "int8", "--set", "runtime.max_tokens=77").strip() != whole


def test_its_errors_are_those_of_every_command() -> None:
    said = run("digest", "--recipe", "int9", code=1)
    assert "error:" in said and "did you mean 'int8'" in said
    run("digest", "--recipes", "int8", code=2)
    result = CliRunner().invoke(app, ["digest", "--recipe", "int9", "--debug"])
    assert isinstance(result.exception, RecipeError)
