"""A rule made wrong for a while: some text of a module is another, wherever its functions are in use already."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Function = types.FunctionType


@contextmanager
def broken(module: types.ModuleType, right: str, wrong: str) -> Iterator[None]:
    """`module` with `wrong` in place of `right`, which stands there once and has as many lines."""
    source = inspect.getsource(module)
    if source.count(right) != 1 or right.count("\n") != wrong.count("\n"):
        raise ValueError(
            f"expected one {right!r} in {module.__name__}, found {source.count(right)}; change the mutant"
        )
    scratch: dict[str, Any] = {"__name__": module.__name__}
    sys_module = sys.modules[module.__name__]
    exec(compile(source.replace(right, wrong), str(module.__file__), "exec"), scratch)
    assert sys.modules[module.__name__] is sys_module
    codes, values = _changes(vars(module), scratch)
    if not codes and not values:
        raise ValueError(f"{wrong!r} changes nothing in {module.__name__}")
    kept = [(function, function.__code__) for function, _ in codes]
    users = [m for name, m in list(sys.modules.items()) if name.startswith("kvcompile.")]
    named = [(m, name, old) for name, old, _ in values for m in users if vars(m).get(name) is old]
    new = {name: value for name, _, value in values}
    try:
        for function, code in codes:
            function.__code__ = code
        for user, name, _ in named:
            setattr(user, name, new[name])
        yield
    finally:
        for function, code in kept:
            function.__code__ = code
        for user, name, old in named:
            setattr(user, name, old)


def _changes(
    right: dict[str, Any], wrong: dict[str, Any]
) -> tuple[list[tuple[Function, types.CodeType]], list[tuple[str, Any, Any]]]:
    """Functions with their new code, and constants with their new values."""
    codes: list[tuple[Function, types.CodeType]] = []
    values = []
    for name, old in right.items():
        found = list(_pairs(old, wrong.get(name), right["__name__"]))
        codes += [(a, b.__code__) for a, b in found if a.__code__ != b.__code__]
        plain = isinstance(old, (int, float, str, tuple, dict)) and not name.startswith("__")
        if plain and _differ(old, wrong[name]):
            values.append((name, old, wrong[name]))
    return codes, values


def _differ(old: Any, new: Any) -> bool:
    """Whether constants differ by more than their functions and classes, which are made anew."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() != new.keys() or any(_differ(part, new[key]) for key, part in old.items())
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) != len(new) or any(map(_differ, old, new))
    return not isinstance(old, (Function, type)) and bool(old != new)


def _pairs(old: Any, new: Any, module: str) -> Iterator[tuple[Function, Function]]:
    """The functions in something and in what stands for it: itself, methods, values of tables."""
    if isinstance(old, Function) and isinstance(new, Function):
        if old.__module__ == module:
            yield old, new
    elif isinstance(old, property) and isinstance(new, property):
        yield from _pairs(old.fget, new.fget, module)
    elif isinstance(old, staticmethod):
        yield from _pairs(old.__func__, new.__func__, module)
    elif isinstance(old, type) and old.__module__ == module and isinstance(new, type):
        for name, part in vars(old).items():
            yield from _pairs(part, vars(new).get(name), module)
    elif isinstance(old, dict) and isinstance(new, dict):
        for key, part in old.items():
            yield from _pairs(part, new.get(key), module)
    elif isinstance(old, tuple) and isinstance(new, tuple):
        for part, other in zip(old, new, strict=False):
            yield from _pairs(part, other, module)
