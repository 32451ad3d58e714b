"""What a forward changes besides its result: seen by looking before and after, named by module and attribute.

Looked at: attributes and buffers of every module (into lists, dicts and plain objects), versions of parameters, class
attributes, and the global variables of the files that the model's classes are written in. The libraries' own are not.
`passes/capture/harmless.py` says which changes do no harm.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_INTERNAL = frozenset(nn.Module().__dict__)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_MANY = 1000  # what is longer and lies outside of the model is data of the user's
_LIBRARIES = ("torch", "builtins", "kvcompile", "transformers", "collections", "abc", "typing")


@dataclass(frozen=True)
class Place:
    """Something that outlives a forward: `name` of `owner`, which is a module, a class or a file's globals."""

    owner: Any
    label: str  # of the owner, as the user knows it: "layers.0.attn", "class Attention", "globals of model"
    name: str

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.owner is other.owner and self.name == other.name

    def __str__(self) -> str:
        if isinstance(self.owner, nn.Module):
            path = f"{self.label}.{self.name}" if self.label else self.name
            return f"{path} ({type(self.owner).__name__})"
        return f"{self.name} ({self.label})"

    def held(self) -> Any:
        """What is there now."""
        if isinstance(self.owner, nn.Module):
            found = {**vars(self.owner), **self.owner._buffers, **self.owner._parameters}
        else:
            found = dict(_variables(self.owner))
        return found.get(self.name, _ABSENT)


_ABSENT = object()


class Snapshot:
    """All places and what they hold, to compare with a later look."""

    def __init__(self, model: nn.Module, copies: bool = True):
        """copies: keep the values of buffers and attributes, too: `.data` is written to without a version."""
        self.model = model
        self.holds: dict[Place, list[tuple[Any, ...]]] = {}
        self.copies: dict[int, Tensor] = {}
        seen: set[int] = set()
        for owner, label, variables, own in _owners(model):
            for name, held in variables.items():
                self.holds[Place(owner, label, name)] = list(self._leaves(held, (), seen, own, copies))

    def changed(self) -> tuple[Place, ...]:
        """The places that are not as they were."""
        now = Snapshot(self.model, copies=False)
        places = dict.fromkeys((*self.holds, *now.holds))
        return tuple(place for place in places if not self._same(now, place))

    def unnoticed(self, place: Place) -> bool:
        """Whether a tensor in a place has other values, and torch counts no write to it."""
        after = Snapshot(self.model, copies=False).holds.get(place, [])
        for old, new in zip(self.holds.get(place, []), after, strict=False):
            copy = self.copies.get(id(old[-1]))
            if copy is not None and old[-1] is new[-1] and old[-2] == new[-2] and not _equal(copy, new[-1]):
                return True
        return False

    def in_place(self, place: Place) -> bool:
        """Whether a place that has changed holds the very same tensors as before, with other values."""
        before = [leaf[-1] for leaf in self.holds.get(place, [])]
        after = [leaf[-1] for leaf in Snapshot(self.model, copies=False).holds.get(place, [])]
        same = len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
        return same and any(isinstance(leaf, Tensor) for leaf in before)

    def _same(self, now: Snapshot, place: Place) -> bool:
        before, after = self.holds.get(place), now.holds.get(place)
        if before is None or after is None or len(before) != len(after):
            return False
        for old, new in zip(before, after, strict=True):
            if old[:-1] != new[:-1]:
                return False
            if isinstance(old[-1], Tensor):
                if old[-1] is not new[-1]:
                    return False
                copy = self.copies.get(id(old[-1]))
                if copy is not None and not _equal(copy, new[-1]):
                    return False
            elif old[-1] is not new[-1] and not (isinstance(old[-1], _PLAIN) and old[-1] == new[-1]):
                return False
        return True

    def _leaves(
        self, value: Any, steps: tuple[Any, ...], seen: set[int], own: bool, copies: bool
    ) -> Iterator[tuple[Any, ...]]:
        """(way, version, value) of all that a place holds; the value itself last, so that it stays alive."""
        if isinstance(value, Tensor):
            if copies and own and not value.is_meta and id(value) not in self.copies:
                self.copies[id(value)] = value.detach().clone()
            yield steps, getattr(value, "_version", 0), value
            return
        if isinstance(value, (*_PLAIN, *_CODE, nn.Module)):
            yield steps, type(value), value
            return
        if id(value) in seen or (not own and isinstance(value, (list, dict, set)) and len(value) > _MANY):
            yield steps, len(value) if isinstance(value, (list, dict, set)) else type(value), value
            return
        seen.add(id(value))
        yield steps, type(value), value
        inside: Mapping[Any, Any] = {}
        if isinstance(value, dict):
            inside = value
        elif isinstance(value, (list, tuple, deque)):
            inside = dict(enumerate(value))
        elif isinstance(value, (set, frozenset)):
            inside = dict.fromkeys(value)
        elif hasattr(value, "__dict__"):
            inside = vars(value)
        for key, item in list(inside.items()):
            yield from self._leaves(item, (*steps, key), seen, own, copies)


def _owners(model: nn.Module) -> Iterator[tuple[Any, str, Mapping[str, Any], bool]]:
    """What may hold something, its label, its variables, and whether its tensors are compared by value."""
    classes: dict[type, None] = {}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
        yield module, path, {**own, **module._buffers}, True
        yield module, path, dict(module._parameters), False
        classes |= dict.fromkeys(type(module).__mro__)
    files = {}
    for kind in classes:
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            yield kind, f"class {kind.__name__}", _variables(kind), False
            files[kind.__module__] = sys.modules.get(kind.__module__)
    for name, file in files.items():
        if file is not None:
            yield file, f"global of {name}", _variables(file), False


def _variables(owner: Any) -> dict[str, Any]:
    """What a class or a file holds that is no code."""
    kinds = (*_PLAIN, Tensor, list, dict, set, deque)
    return {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, kinds) and not name.startswith("__")
    }


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
