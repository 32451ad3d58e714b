"""Reading recipes: shipped names, YAML files (safe loading only), dicts; every problem at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from difflib import get_close_matches
from functools import partial
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvcompile.errors import RecipeError
from kvcompile.recipe.scales import Scales
from kvcompile.recipe.schema import CacheConfig, Recipe, RuntimeConfig, merge_cache
from kvcompile.recipe.told import problems_of
from kvcompile.recipe.yaml_text import YamlProblems, read_yaml

_DEEPEST = 16  # brackets in brackets
_LONGEST = 255  # characters of a name in a message
_SECTIONS = tuple(Recipe.model_fields)
_RUNTIME_KEYS = tuple(RuntimeConfig.model_fields)


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with kvcompile."""
    folder = resources.files("kvcompile.recipes")
    return tuple(sorted(Path(item.name).stem for item in folder.iterdir() if item.name.endswith(".yaml")))


def shipped_text(name: str) -> str:
    """The YAML text of a shipped recipe."""
    return (resources.files("kvcompile.recipes") / f"{name.removesuffix('.yaml')}.yaml").read_text("utf-8")


def load_recipe(source: object, **overrides: Any) -> Recipe:
    """Read and check a recipe.

    Args:
        source: a shipped name (with or without .yaml), a path of a YAML file, a mapping, or a Recipe.
            `scales` in a file is relative to that file, else to the working directory.
        overrides: sections merged over it (`cache={...}`, `runtime={...}`, `verify="off"`), or a key of
            `runtime` by itself (`max_tokens=4096`).

    Raises:
        RecipeError: unreadable or unsafe YAML, unknown keys, impossible values: all of them, each with the
            file, the path in it, what was given and what is allowed. Also a file of scales that is none.
    """
    if isinstance(source, Recipe):
        if not overrides:
            return source
        data, where = source.model_dump(exclude_unset=True), f"recipe {source.name!r}"
    elif isinstance(source, Mapping):
        data, where = _own(dict(source)), "recipe (dict)"
    elif isinstance(source, (str, Path)):
        data, where = _read(source)
    else:
        raise RecipeError(
            "recipe", [f"expected a name, a path, a mapping or a Recipe, got {type(source).__name__}"]
        )
    if overrides:
        data = _override(data, _own(overrides), where)
    if isinstance(data.get("scales"), (str, PathLike)):  # it must mean the same file later, and in a dump
        data = {**data, "scales": os.path.abspath(data["scales"])}
    return _validate(data, where)


def _own(value: Any, depth: int = 0) -> Any:
    """A copy of what dicts and lists hold: a recipe stays as it was read when its caller writes into them later."""
    if depth > _DEEPEST:  # no recipe, and what holds itself has no end
        return value
    if isinstance(value, dict):
        return {key: _own(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_own(item, depth + 1) for item in value]
    if type(value) is tuple:
        return tuple(_own(item, depth + 1) for item in value)
    return value


def _read(source: str | Path) -> tuple[dict[str, Any], str]:
    path = Path(source)
    name = str(source).removesuffix(".yaml")
    if not str(source):
        raise RecipeError("recipe", [f"expected a name or a path, got ''; {names_like(name)}"])
    if isinstance(source, str) and path.name == source and name in shipped_recipes() and not _is_file(path):
        text, where = shipped_text(name), f"{name}.yaml"
    else:
        where = str(path)[:_LONGEST]
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            raise RecipeError(
                where, [f"no such file, and no shipped recipe of that name; {names_like(name)}"]
            ) from None
        except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name that no file can have
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise RecipeError(where, [f"cannot be read: {reason}"]) from error
    try:
        data = read_yaml(text)
    except YamlProblems as error:
        raise RecipeError(where, error.problems) from error
    if not isinstance(data, dict):
        raise RecipeError(where, [f"expected a mapping of {', '.join(_SECTIONS)}; got {type(data).__name__}"])
    if isinstance(source, (str, Path)) and "name" not in data:
        data = {"name": path.stem, **data}
    if isinstance(data.get("scales"), str):
        data = {**data, "scales": str(path.parent / data["scales"])}
    return data, where


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def names_like(name: str) -> str:
    """Which recipes are shipped, and which of them may have been meant."""
    known = shipped_recipes()
    near = get_close_matches(Path(name).name.removesuffix(".yaml").lower(), known, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"shipped: {', '.join(known)}{meant}"


def _override(data: dict[str, Any], overrides: dict[str, Any], where: str) -> dict[str, Any]:
    merged, problems = dict(data), []
    for key, value in overrides.items():
        if key in _RUNTIME_KEYS:
            runtime = merged.get("runtime") or {}
            if isinstance(runtime, Mapping):  # else the schema says what it should be
                merged["runtime"] = {**runtime, key: value}
        elif key not in _SECTIONS:
            allowed = ", ".join((*_SECTIONS, *_RUNTIME_KEYS))
            problems.append(f"override {key!r} is unknown; allowed: {allowed}")
        elif key == "cache" and isinstance(value, Mapping) and isinstance(merged.get("cache"), dict):
            merged["cache"] = merge_cache(merged["cache"], dict(value))
        elif isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    if problems:
        raise RecipeError(where, problems)
    return merged


def _validate(data: dict[str, Any], where: str) -> Recipe:
    problems: list[str] = []
    recipe: Recipe | None = None
    try:
        # JSON mode of strictness: YAML has lists where the schema has tuples.
        recipe = Recipe.model_validate(_tuples(data))
    except ValidationError as error:
        problems += problems_of(error)
    if recipe is not None and recipe.scales is not None:
        try:
            Scales.load(recipe.scales)
        except RecipeError as error:
            problems += [f"scales: {error.source}: {problem}" for problem in error.problems]
    problems += _rule_problems(data)
    if problems or recipe is None:
        raise RecipeError(where, problems)
    return recipe


def _rule_problems(data: dict[str, Any]) -> list[str]:
    """What is wrong with each entry of `layers`, merged over `cache`.

    What keys say together is left alone where an entry before it says something of the same axis: it may make sense
    of it in the layers that both are for. `Recipe.cache_for` tells of those in which it does not.
    """
    rules = data.get("layers")
    base = data.get("cache") or {}
    if not isinstance(rules, (list, tuple)) or not isinstance(base, dict):
        return []
    problems: list[str] = []
    said: set[object] = set()  # axes of which entries before say something
    for number, rule in enumerate(rules):
        change = rule.get("cache") if isinstance(rule, dict) else getattr(rule, "cache", None)
        if not isinstance(change, dict):
            continue
        try:
            CacheConfig.model_validate(merge_cache(base, change))
        except ValidationError as error:
            path = ("layers", number, "cache")
            problems += problems_of(error, path, partial(_is_of, change=change, said=frozenset(said)))
        said |= change.keys()
    return problems


def _is_of(item: Mapping[str, Any], change: Mapping[str, Any], said: Set[object]) -> bool:
    """Whether a problem of a merged entry is its own: neither of `cache` alone, nor one that others may answer."""
    axis = item["loc"][0] if item["loc"] else None
    if item["type"] == "value_error" and (said if axis is None else axis in said):
        return False
    return axis is None or axis in change


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if key == "layers" and isinstance(value, list) else value
        for key, value in data.items()
    }
