"""Records of `report.py` out of JSON, checked."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Made = TypeVar("Made")


def decode(kind: type[Made], data: Any) -> Made:
    """A dataclass from what `asdict` and JSON made of it, with exactly its fields and their types.

    Raises:
        ValueError: something else.
    """
    hints = get_type_hints(kind)
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(data, dict) or set(data) != names:
        raise ValueError(f"expected the fields of {kind.__name__}")
    return kind(**{name: _value(hints[name], data[name]) for name in names})


def _value(hint: Any, value: Any) -> Any:
    if get_origin(hint) is UnionType:  # `X | None`, `int | str`
        if value is None and type(None) in get_args(hint):
            return None
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        hint = next((choice for choice in choices if choice is type(value)), choices[0])
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, got {type(value).__name__}")
        return tuple(_value(get_args(hint)[0], item) for item in value)
    if is_dataclass(hint):
        return decode(hint, value)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not (get_origin(hint) or hint):
        raise ValueError(f"expected {hint}, got {value!r}")
    return value
