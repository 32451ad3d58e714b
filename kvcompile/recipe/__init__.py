"""Recipes: YAML in, checked and frozen `Recipe` out."""

from kvcompile.recipe.load import load_recipe, shipped_recipes, shipped_text
from kvcompile.recipe.schema import Recipe

__all__ = ["Recipe", "load_recipe", "shipped_recipes", "shipped_text"]
