"""Plain values and records of kvcompile's own (a plan and all in it) as JSON, and back.

| value | JSON |
|---|---|
| None, bool, int, str, finite float | itself |
| another float | {"float": "-inf"} |
| tuple | a list |
| torch.dtype, torch.device | {"dtype": "float32"}, {"device": "cpu"} |
| a dataclass of kvcompile | {"is": "kvcompile.plan:Limits", its fields} |
"""

from __future__ import annotations

import dataclasses
import math
from importlib import import_module
from typing import Any

import torch

from kvcompile.targets.manifest import dtype_name, dtype_named


def to_json(value: Any) -> Any:
    """Raises TypeError where a value is of another kind."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"is": f"{kind.__module__}:{kind.__qualname__}", **fields}
    raise TypeError(f"a value of type {type(value).__name__}")


def of_json(data: Any) -> Any:
    """The inverse of `to_json`; raises ValueError where `data` is none of its results."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return tuple(of_json(item) for item in data)
    match data:
        case {"float": str(text), **rest} if not rest:
            return float(text)
        case {"dtype": str(name), **rest} if not rest:
            return dtype_named(name)
        case {"device": str(name), **rest} if not rest:
            return torch.device(name)
        case {"is": str(name), **fields}:
            return _record(name)(**{str(key): of_json(value) for key, value in fields.items()})
    raise ValueError(f"no value: {str(data)[:80]}")


def _record(name: str) -> Any:
    module, _, kind = name.partition(":")
    if module.split(".")[0] != "kvcompile":
        raise ValueError(f"{name} is no record of kvcompile")
    found = getattr(import_module(module), kind)
    if not dataclasses.is_dataclass(found):
        raise ValueError(f"{name} is no record")
    return found
