"""What an engine goes by: what its caller gave, over the section `serve` of the module's recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvcompile.errors import InputError
from kvcompile.recipe import Recipe
from kvcompile.recipe.serve import ServeConfig
from kvcompile.recipe.told import problems_of


def settings(recipe: Recipe | None, given: Mapping[str, Any]) -> ServeConfig:
    """
    Args:
        recipe: that the module was optimized with; None: not known.
        given: arguments by their names; None: as the recipe has it.

    Raises:
        InputError: arguments that no recipe could have, all of them.
    """
    try:
        return (ServeConfig() if recipe is None else recipe.serve).over(given)
    except ValidationError as error:
        raise InputError("; ".join(problems_of(error))) from error
