"""Seeing who reads an attribute: for the time of a forward, modules tell of every access to some of their attributes.

A number that is only counted up, or a list that is only appended to, has not been read: what stands for it keeps
count, and tells when anybody compares it, converts it, or hands it to torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from kvcompile.passes.capture.changes import Place


class _Stand:
    """Stands for a value; `tell` is called when it is used for anything but itself."""

    def __init__(self, value: Any, tell: Callable[[], None]):
        self.value, self.tell = value, tell

    def plain(self) -> Any:
        self.tell()
        return self.value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils import _pytree as pytree

        def plain(leaf: Any) -> Any:
            return leaf.plain() if isinstance(leaf, _Stand) else leaf

        return func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain(), name)

    def __bool__(self) -> bool:
        return bool(self.plain())

    def __int__(self) -> int:
        return int(self.plain())

    def __index__(self) -> int:
        return operator.index(self.plain())

    def __float__(self) -> float:
        return float(self.plain())

    def __str__(self) -> str:
        return str(self.plain())

    def __format__(self, how: str) -> str:
        return format(self.plain(), how)

    def __hash__(self) -> int:
        return hash(self.plain())

    def __eq__(self, other: object) -> bool:
        return bool(self.plain() == other)

    def __lt__(self, other: Any) -> Any:
        return self.plain() < other

    def __le__(self, other: Any) -> Any:
        return self.plain() <= other

    def __gt__(self, other: Any) -> Any:
        return self.plain() > other

    def __ge__(self, other: Any) -> Any:
        return self.plain() >= other


class _Number(_Stand):
    """A number that may be counted up without being read."""


def _counting(name: str) -> Callable[..., Any]:
    act = getattr(operator, name)

    def forward(self: _Number, other: Any) -> Any:
        if type(other) in (int, float, bool):
            return _Number(act(self.value, other), self.tell)
        return act(self.plain(), other.plain() if isinstance(other, _Stand) else other)

    return forward


def _reading(name: str) -> Callable[..., Any]:
    act = getattr(operator, name)

    def backward(self: _Number, other: Any) -> Any:
        return act(other, self.plain())

    return backward


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_Number, f"__{_name}__", _counting(_name))
    setattr(_Number, f"__r{_name}__", _reading(_name))
    setattr(_Number, f"__i{_name}__", _counting(_name))


class _List(_Stand):
    """A list that may be appended to without being read."""

    def append(self, item: Any) -> None:
        self.value.append(item)

    def extend(self, items: Any) -> None:
        self.value.extend(items)

    def __iadd__(self, items: Any) -> _List:
        self.value.extend(items)
        return self

    def __len__(self) -> int:
        return len(self.plain())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plain())

    def __getitem__(self, index: Any) -> Any:
        return self.plain()[index]

    def __setitem__(self, index: Any, item: Any) -> None:
        self.plain()[index] = item

    def __contains__(self, item: Any) -> bool:
        return item in self.plain()


@contextmanager
def watched(places: Sequence[Place]) -> Iterator[Callable[[], set[Place]]]:
    """Modules tell of accesses to `places`; yields a function that lists those read before they were written."""
    read: set[Place] = set()
    written: set[Place] = set()
    by_module: dict[int, dict[str, Place]] = {}
    classes: dict[int, tuple[nn.Module, type]] = {}
    for place in places:
        by_module.setdefault(id(place.owner), {})[place.name] = place
        classes[id(place.owner)] = (place.owner, type(place.owner))
    try:
        for module, kind in classes.values():
            module.__class__ = _telling(kind, by_module[id(module)], read, written)
        yield lambda: set(read)
    finally:
        for module, kind in classes.values():
            object.__setattr__(module, "__class__", kind)
            for name in by_module[id(module)]:
                held = vars(module).get(name)
                if isinstance(held, _Stand):
                    vars(module)[name] = held.value


def _telling(kind: Any, names: dict[str, Place], read: set[Place], written: set[Place]) -> Any:
    """A class like `kind`, whose instances tell."""

    def get(self: Any, name: str) -> Any:
        place = names.get(name)
        if place is None:
            return kind.__getattribute__(self, name)
        value = kind.__getattribute__(self, name)  # a buffer is found by __getattr__, after this has raised
        if place in written or isinstance(value, _Stand):
            return value
        if type(value) in (int, float):
            return _Number(value, lambda: read.add(place))
        if type(value) is list:
            return _List(value, lambda: read.add(place))
        read.add(place)
        return value

    def get_other(self: Any, name: str) -> Any:
        place = names.get(name)
        if place is not None and place not in written:
            read.add(place)
        return kind.__getattr__(self, name)

    def put(self: Any, name: str, value: Any) -> None:
        place = names.get(name)
        if place is not None and not isinstance(value, (_Number, _List)):
            written.add(place)
        kind.__setattr__(self, name, value)

    def register(self: Any, name: str, tensor: Any, persistent: bool = True) -> None:
        if name in names:
            written.add(names[name])
        kind.register_buffer(self, name, tensor, persistent)

    body = {
        "__getattribute__": get,
        "__getattr__": get_other,
        "__setattr__": put,
        "register_buffer": register,
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), body)
