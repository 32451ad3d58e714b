"""What pydantic found wrong with a recipe, in the words of its keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from kvcompile.recipe import schema, storage
from kvcompile.recipe.auto import AutoConfig
from kvcompile.recipe.retention import KINDS, RetentionConfig
from kvcompile.recipe.selection import KINDS as SELECTION_KINDS
from kvcompile.recipe.selection import SelectionConfig
from kvcompile.recipe.serve import ServeConfig
from kvcompile.util.console import shown

Path = tuple[str | int, ...]
Item = Mapping[str, Any]

# What pydantic puts into a path where a key may be one thing or another: no key of a recipe is called so.
_ONE_OF = re.compile(r"(constrained-)?(int|str|float)|list\[.*\]")
# A mapping is a "valid dictionary or instance of RuntimeConfig" to pydantic, and a list a tuple.
_KINDS_OF_VALUES = {
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}
_BY_KEY: dict[str, type[BaseModel]] = {
    "": schema.Recipe,
    "auto": AutoConfig,
    "cache": schema.CacheConfig,
    "keys": storage.KeysConfig,
    "values": storage.StorageConfig,
    "placement": schema.PlacementConfig,
    "runtime": schema.RuntimeConfig,
    "serve": ServeConfig,
    "compile": schema.CompileConfig,
    "where": schema.Where,
    "layers": schema.LayerRule,
}


def _by_kind(union: Any) -> dict[str, type[BaseModel]]:
    return {model.model_fields["kind"].default: model for model in get_args(get_args(union)[0])}


_BY_KIND = {"retention": _by_kind(RetentionConfig), "selection": _by_kind(SelectionConfig)}


def problems_of(
    error: ValidationError, prefix: Path = (), wanted: Callable[[Item], bool] = lambda item: True
) -> list[str]:
    """A line for each thing that is wrong: its path, what was expected, and what came.

    prefix: of the path
    wanted: whether a problem is to be told
    """
    told: dict[tuple[str, str], list[str]] = {}
    for item in error.errors():
        if wanted(item):
            path, expected, got = _parts((*prefix, *item["loc"]), item)
            told.setdefault((path, got), []).append(expected)
    # Where a key may be one thing or another, it is wrong in several ways, and once.
    return [
        f"{path}: {' or '.join(dict.fromkeys(expected))}{got}".replace(" or expected ", " or ")
        for (path, got), expected in told.items()
    ]


def _parts(whole: Path, item: Item) -> tuple[str, str, str]:
    """Path, what is wrong, and what came instead, of one problem."""
    given, kind, context = item.get("input"), item["type"], item.get("ctx", {})
    own = _without_tags(whole)
    path = _written(own)
    if kind == "extra_forbidden":
        return path, f"unknown key{_allowed(whole, own)}", ""
    if kind == "invalid_key":
        return _written(own[:-1]), f"expected keys that are words, got {shown(given)}; put it in quotes", ""
    if kind == "missing":
        return path, "is required", ""
    if kind == "union_tag_invalid":
        return f"{path}.kind", f"expected one of {context['expected_tags']}", f", got {shown(context['tag'])}"
    if kind == "union_tag_not_found":
        kinds = SELECTION_KINDS if "selection" in own else KINDS
        return f"{path}.kind", f"is required, one of {', '.join(map(repr, kinds))}", ""
    if kind == "value_error":
        return path, str(context["error"]), ""
    if kind in _KINDS_OF_VALUES:
        return path, f"expected {_KINDS_OF_VALUES[kind]}", f", got {shown(given)}"
    message = item["msg"][0].lower() + item["msg"][1:]
    return path, message.replace("input should be", "expected"), f", got {shown(given)}"


def _written(loc: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.lstrip(".") or "(top)"


def _without_tags(whole: Path) -> Path:
    """The path of keys alone: pydantic's has the kind of a tagged union, and which of several types was tried."""
    return tuple(
        part
        for number, part in enumerate(whole)
        if not (
            number
            and isinstance(part, str)
            and (part in _BY_KIND.get(str(whole[number - 1]), ()) or _ONE_OF.fullmatch(part))
        )
    )


def _allowed(whole: Path, own: Path) -> str:
    """Which keys there are beside an unknown one, and which of them may have been meant."""
    names = [part for part in own[:-1] if isinstance(part, str)]
    last = names[-1] if names else ""
    kind = next((part for part in whole if part in _BY_KIND.get(last, ())), None)
    model = _BY_KEY.get(last) if kind is None else _BY_KIND[last][str(kind)]
    if model is None:
        return ""
    near = get_close_matches(str(own[-1]), model.model_fields, 1, cutoff=0.7)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"; allowed: {', '.join(model.model_fields)}{meant}"
