"""The shipped YAML recipes, imported as `kvcompile.recipes` (data only)."""
