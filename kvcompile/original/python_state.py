"""Whether the original's Python is still what was traced: its modules, what these do, and what they read.

A graph has all of it as it was when the model was optimized. What has changed since then is told at the next call:

| what happens to the original | at the next call |
|---|---|
| a module is replaced or taken away (`model.lm_head = ..`, `del layers[1]`), a list of modules grows | InputError |
| a module gets another `forward` or class, or its class another `forward` | InputError |
| a buffer that is not saved changes in place, and something was computed from it | InputError |
| forward hooks come or go | a warning, once |
| an attribute, a config's field, or a buffer that is not saved has another value | a warning, once |

Whether a forward reads an attribute is not known, so that is a warning. Names that are new are not looked at: nothing
that was traced has asked for them. What forwards change themselves (a counter, a table by length) is not told:
capturing has found that it does no harm. Functions that a forward calls, and globals, are not watched.
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kvcompile.errors import InputError
from kvcompile.original.checks import GLOBAL_HOOKS, hooks_of
from kvcompile.util.listed import listed

_HANDLED = frozenset(vars(nn.Module()))
_LISTS = (nn.ModuleList, nn.Sequential)  # forwards go through them, whatever is in there
# How something is trained, called or named, and not what it computes: of models and configs of libraries.
_NO_MATTER = frozenset(("use_cache", "gradient_checkpointing", "name_or_path", "generation_config", "dtype"))
_MANY = 1000  # what is longer is not copied
_FEW = 3  # that a message names
_LONG = 40  # a value that no message has


@dataclass
class _Place:
    """Where a value stands that a forward may read.

    label:   as users know it
    owner:   what it is in: the variables of a module or of a config, or a module's buffers
    was:     the value; of a list, dict or set a copy
    version: of a tensor that the graph does not read where it stands
    """

    label: str
    owner: dict[str, Any]
    key: str
    was: Any
    version: int | None

    def changed(self, tensors: bool) -> bool:
        now = self.owner.get(self.key)
        if isinstance(now, Tensor) or isinstance(self.was, Tensor):
            return tensors and not _same(now, self.was)
        return not _same(now, self.was)

    def written(self) -> bool:
        now = self.owner.get(self.key)
        return now is self.was and self.version is not None and now._version != self.version

    def told(self) -> str:
        now = self.owner.get(self.key)
        if self.key not in self.owner:
            return f"{self.label} is gone"
        if isinstance(now, Tensor) or max(len(repr(now)), len(repr(self.was))) > _LONG:
            return f"{self.label} has changed"
        return f"{self.label} was {self.was!r} and is {now!r}"

    def take(self) -> None:
        """What is there now is what is known."""
        now = self.owner.get(self.key)
        if now is not self.was:
            self.version = _version(now)
        self.was = _kept(now)


class PythonState:
    """What a model is beside its weights, to be compared at every call."""

    def __init__(self, model: nn.Module, read: Iterable[Tensor], changing: Collection[tuple[str, str]] = ()):
        """
        Args:
            read: tensors that the graph reads where they stand: what is written into them is seen.
            changing: what forwards change by themselves, as (path of the module, attribute).
        """
        self._model = model
        self._named = list(model.named_modules())
        self._families = [(path, each, dict(each._modules)) for path, each in self._named if each._modules]
        self._homes = [module._modules for _, module, _ in self._families]
        self._children = self._children_now()
        self._modules = [module for _, module in self._named]
        self._kinds: list[type[nn.Module]] = list(map(type, self._modules))
        self._forwards: dict[type[nn.Module], Any] = {kind: kind.forward for kind in self._kinds}
        self._own_forwards = [vars(module).get("forward") for module in self._modules]
        hooks = ((each._forward_hooks, each._forward_pre_hooks) for each in self._modules)
        self._hooks: list[Any] = [*chain.from_iterable(hooks), *GLOBAL_HOOKS]
        self._hook_counts = list(map(len, self._hooks))
        self._hook_names = hooks_of(model)
        self._places = list(_places(self._named, {tensor.data_ptr() for tensor in read}, changing))
        # Lists beside each other, so that asking for a thousand values takes little.
        self._owners = [place.owner for place in self._places] + [vars(module) for module in self._modules]
        self._keys = [place.key for place in self._places] + ["forward"] * len(self._modules)
        self._know()

    def _know(self) -> None:
        self._hooked = any(self._hook_counts)
        self._values = [place.was for place in self._places] + self._own_forwards
        written = [place for place in self._places if place.version is not None]
        self._tensors, self._versions = [place.was for place in written], [place.version for place in written]

    def check(self, model: nn.Module, tensors: bool = True) -> None:
        """Tell what is not as it was.

        Args:
            model: what stands in the place of the original.
            tensors: False: the original has been moved, and its tensors are others.

        Raises:
            InputError: it has other modules, or other forwards.
        """
        if model is not self._model:
            raise InputError(
                "the optimized module's `model` is another one now, and its graph is that of the one before: call "
                "kvcompile.optimize for the new one"
            )
        if self._as_it_was():
            return
        self._check_modules()
        self._check_forwards()
        self._check_written()
        self._tell_of_hooks()
        self._tell_of_values(tensors)
        self._know()

    def _as_it_was(self) -> bool:
        """Quick: this is asked at every call."""
        try:
            return (
                self._children_now() == self._children
                and list(map(type, self._modules)) == self._kinds
                and [kind.forward for kind in self._forwards] == list(self._forwards.values())
                and (
                    list(map(len, self._hooks)) == self._hook_counts if self._hooked else not any(self._hooks)
                )
                and list(map(dict.get, self._owners, self._keys)) == self._values
                and [tensor._version for tensor in self._tensors] == self._versions
            )
        except (RuntimeError, ValueError, TypeError):  # tensors or arrays in the place of others
            return False

    def _children_now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._homes)))

    def _check_modules(self) -> None:
        for path, module, known in self._families:
            now = module._modules
            for name, child in known.items():
                if now.get(name) is not child:
                    raise _other(f"{_join(path, name)} is {_what(now.get(name), child)}")
            if isinstance(module, _LISTS) and list(now) != list(known):
                raise _other(f"{path or type(module).__name__} has {len(now)} modules and had {len(known)}")
        self._children = self._children_now()  # with those that came under new names

    def _check_forwards(self) -> None:
        for (path, module), kind, own in zip(self._named, self._kinds, self._own_forwards, strict=True):
            if type(module) is not kind:
                raise _other(f"{path or 'model'} is a {type(module).__name__} and was a {kind.__name__}")
            now = vars(module).get("forward")
            if now is not own and not _compiled(now, module, own):
                raise _other(f"{_join(path, 'forward')} is another function")
        for kind, forward in self._forwards.items():
            if kind.forward is not forward:
                raise _other(f"{kind.__name__}.forward is another function")

    def _check_written(self) -> None:
        for place in self._places:
            if place.written():
                raise _other(f"{place.label} was changed in place, and what was computed from it was not")

    def _tell_of_hooks(self) -> None:
        names, self._hook_counts = hooks_of(self._model), list(map(len, self._hooks))
        come = [name for name in names if name not in self._hook_names]
        gone = [name for name in self._hook_names if name not in names]
        self._hook_names = names
        if come or gone:
            what = [f"{listed(each, _FEW)} {how}" for each, how in ((come, "came"), (gone, "went")) if each]
            _warn(
                f"forward hooks of the original: {' and '.join(what)} after it was optimized. The optimized module "
                "calls none, and has in its graph what hooks did to tensors then; call kvcompile.optimize again for "
                "what they do now"
            )

    def _tell_of_values(self, tensors: bool) -> None:
        changed = [place.told() for place in self._places if place.changed(tensors)]
        if changed:
            _warn(
                f"of the original, {listed(changed, _FEW)} since it was optimized: the optimized module computes with "
                "what was there. If a forward reads it, call kvcompile.optimize again"
            )
        for place in self._places:
            place.take()
        self._own_forwards = [vars(module).get("forward") for module in self._modules]


def _places(
    named: Iterable[tuple[str, nn.Module]], direct: Collection[int], changing: Collection[tuple[str, str]]
) -> Iterator[_Place]:
    seen: set[int] = set()
    for path, module in named:
        of_library = _of_library(module)
        own = [name for name in vars(module) if name not in _HANDLED and name != "forward"]
        unsaved = sorted(module._non_persistent_buffers_set)
        for owner, names in ((vars(module), own), (module._buffers, unsaved)):
            for name in names:
                value = owner.get(name)
                if (path, name) in changing or (of_library and name in _NO_MATTER):
                    continue
                if _is_config(value, module):
                    yield from _fields(_join(path, name), value, seen)
                yield _place(_join(path, name), owner, name, direct)


def _fields(label: str, config: Any, seen: set[int]) -> Iterator[_Place]:
    """What is in a config, and in those that are in it."""
    if id(config) in seen:
        return
    seen.add(id(config))
    of_library = _of_library(config)
    for name, value in vars(config).items():
        if of_library and (name in _NO_MATTER or name.startswith("_") or name.endswith("_token_id")):
            continue
        if _is_config(value, config):
            yield from _fields(f"{label}.{name}", value, seen)
        yield _place(f"{label}.{name}", vars(config), name, ())


def _place(label: str, owner: dict[str, Any], name: str, direct: Collection[int]) -> _Place:
    value = owner.get(name)
    beside = type(value) is Tensor and value.data_ptr() not in direct
    return _Place(label, owner, name, _kept(value), _version(value) if beside else None)


def _is_config(value: Any, owner: Any) -> bool:
    """Whether what is in an object is looked at, as that of a config."""
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    if (
        is_dataclass(value)
        or isinstance(value, (SimpleNamespace, Namespace))
        or hasattr(value, "to_json_string")
    ):
        return True
    return type(value).__module__.partition(".")[0] == type(owner).__module__.partition(".")[0]


def _of_library(thing: Any) -> bool:
    return type(thing).__module__.startswith(("transformers.", "torch."))


def _kept(value: Any) -> Any:
    """A value that stays as it is when what holds it is changed."""
    if type(value) in (list, tuple) and len(value) <= _MANY:
        return type(value)(map(_kept, value))
    if type(value) is dict and len(value) <= _MANY:
        return {key: _kept(each) for key, each in value.items()}
    return set(value) if type(value) is set and len(value) <= _MANY else value


def _same(now: Any, was: Any) -> bool:
    if now is was:
        return True
    if type(now) is not type(was):
        return False
    if isinstance(now, Tensor):
        known = (now.shape, now.dtype, now.device) == (was.shape, was.dtype, was.device) and not now.is_meta
        return known and torch.equal(now, was)
    if isinstance(now, dict):  # a new key is as a new name
        return all(key in now and _same(now[key], value) for key, value in was.items())
    if type(now) in (list, tuple):
        return len(now) == len(was) and all(map(_same, now, was))
    try:
        return bool(now == was)
    except Exception:  # somebody's own comparison raises anything
        return False


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _compiled(now: Any, module: nn.Module, own: Any) -> bool:
    """Whether a forward is what `torch.compile` made of the one that was there, which computes the same."""
    inside = getattr(now, "_torchdynamo_orig_callable", None)
    if own is not None or inside is None:
        return inside is not None and inside is own
    return getattr(inside, "__func__", None) is type(module).forward and inside.__self__ is module


def _what(now: nn.Module | None, was: nn.Module | None) -> str:
    kinds = ["none" if module is None else f"a {type(module).__name__}" for module in (now, was)]
    return f"another {type(now).__name__}" if len(set(kinds)) == 1 else " and was ".join(kinds)


def _other(what: str) -> InputError:
    return InputError(
        f"the original's {what}, since it was optimized: the optimized module has the graph of what was there; call "
        "kvcompile.optimize again"
    )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=6)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
