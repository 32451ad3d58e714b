"""Recurrent state: modules that carry something from token to token that is no key and no value.

Found by watching, with no names of models or classes: the model runs twice with `use_cache=True`, and whatever a
module's forward changes in the cache object that it was handed (or in its own attributes) and that has the same size
per sequence however many tokens came, is state. Keys and values grow with the tokens. The innermost module that
changes it is a *mixer*: tracing does not look into it, and the rewritten graph calls it on the new tokens with
its state in buffers of the cache.

passes/recurrent/replay.py proves that this state is all that a module needs.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kvcompile.kernels.ops.opaque import Slot, State, template
from kvcompile.passes.capture.opaque import NONE, Run, Steps, tensors_of

log = logging.getLogger(__name__)

_SIZES = ((2, 5), (3, 7))


class StateRefused(Exception):
    """A module keeps state in a way that a cache cannot carry; the text is the exact reason."""


Changed = dict[
    Steps, tuple[tuple[int, ...], torch.dtype]
]  # what a call changed: the way to it, shape and dtype


@dataclass
class _Entered:
    """One call of a module: what it changed in the cache that it was handed, itself or in calls inside."""

    module: nn.Module
    changed: Changed = field(default_factory=dict)
    inner: list[_Entered] = field(default_factory=list)

    def own(self) -> Changed:
        """What no call inside has changed."""
        below = {steps for call in self.inner for steps in call.all()}
        return {steps: found for steps, found in self.changed.items() if steps not in below}

    def all(self) -> Changed:
        found = dict(self.changed)
        for call in self.inner:
            found |= call.all()
        return found

    def walk(self) -> Iterator[_Entered]:
        yield self
        for call in self.inner:
            yield from call.walk()


class _Marks:
    """The tensors that an object holds, with what tells whether one was replaced or written to."""

    def __init__(self, roots: Sequence[object]):
        self.tensors = {
            (number, steps): (tensor, tensor._version)
            for number, root in enumerate(roots)
            for steps, tensor in tensors_of(root)
        }

    def changed(self, roots: Sequence[object]) -> Changed:
        found = {}
        for key, (tensor, version) in _Marks(roots).tensors.items():
            old = self.tensors.get(key)
            if old is None or old[0] is not tensor or old[1] != version:
                found[key[1]] = (tuple(tensor.shape), tensor.dtype)
        return found


def find_states(model: nn.Module, run: Run, without: Run | None) -> dict[nn.Module, State]:
    """The modules of `model` with recurrent state, and how it gets in and out; empty for most models.

    run, without: a pass of the model over (sequences, tokens) that uses a cache, and one that does not; None: such a
    pass is known to change nothing. The model is left as it was.

    Raises:
        StateRefused: there is state that this cannot carry.
    """
    with attributes_restored(model), torch.no_grad():
        # Modules that keep state in attributes may still have some of their last sequence.
        if without is not None:
            without(*_SIZES[0])
        return _find(model, run)


def _find(model: nn.Module, run: Run) -> dict[nn.Module, State]:
    names = {module: name for name, module in model.named_modules()}
    passes: list[list[_Entered]] = []
    attributes: list[dict[nn.Module, Changed]] = []
    for batch, tokens in _SIZES:
        with attributes_restored(model) as changes, _watched(model) as calls:
            run(batch, tokens)
            attributes.append(changes())
        passes.append(calls)
    slots = _cache_slots(passes, names)
    in_modules = _attribute_slots(attributes, passes, names)
    if not slots and not in_modules:
        return {}
    with attributes_restored(model):
        states = _templates(slots, in_modules, run)
    for module, state in states.items():
        log.info("state: %s keeps %s", names[module], ", ".join(slot.name for slot in state.slots))
    return states


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[_Entered]]:
    """The calls of the model's modules, nested as they ran, with what each changed in a cache."""
    top: list[_Entered] = []
    stack: list[tuple[_Entered, list[object], _Marks]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        caches = _caches(args, kwargs)
        call = _Entered(module)
        (stack[-1][0].inner if stack else top).append(call)
        stack.append((call, caches, _Marks(caches)))

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, caches, before = stack.pop()
        call.changed = before.changed(caches)

    with _hooked(model.modules(), enter, leave):
        yield top


@contextmanager
def _hooked(
    modules: Iterable[nn.Module], enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        yield


_NO_CACHE = (Tensor, nn.Module, str, bytes, int, float, torch.dtype, torch.device, type(None))


def _caches(args: Any, kwargs: Any) -> list[object]:
    """The arguments that may be a cache: objects with attributes that are no tensors, modules or functions."""
    found: list[object] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, _NO_CACHE):
            continue
        if isinstance(value, (tuple, list)):
            found += _caches(value, {})
        elif isinstance(value, dict):
            found += _caches((), value)
        elif hasattr(value, "__dict__") and not callable(value):
            found.append(value)
    return found


def _slots(first: Changed, second: Changed) -> tuple[list[Slot], bool]:
    """What is state among the changes of two passes, and whether the rest grows with the tokens (keys, values)."""
    slots, grows = [], False
    (b1, _), (b2, _) = _SIZES
    for steps, (shape, dtype) in first.items():
        later = second.get(steps, ((), dtype))[0]
        # By transformers' cache interface, `keys` and `values` are K/V, even of a window that is full.
        if steps[-1] in (("attr", "keys"), ("attr", "values")) or (
            len(shape) == len(later) and shape[1:] != later[1:]
        ):
            grows = grows or len(shape) > 1
        elif shape and later and (shape[0], later[0]) == (b1, b2):
            slots.append(Slot(steps, shape[1:], dtype))
    return slots, grows


def _cache_slots(passes: list[list[_Entered]], names: dict[nn.Module, str]) -> dict[nn.Module, list[Slot]]:
    """The slots in the cache that each mixer owns."""
    first, second = ([call for top in calls for call in top.walk()] for calls in passes)
    changed = {call.module: call.own() for call in second if call.own()}
    found: dict[nn.Module, list[Slot]] = {}
    covered: set[int] = set()  # calls inside a mixer
    for call in first:
        if id(call) in covered:
            continue
        slots, grows = _slots(call.own(), changed.get(call.module, {}))
        if not slots:
            continue
        path = names.get(call.module, "")
        if call.module in found:
            raise StateRefused(f"{path} is called more than once for each token, with a state for each call")
        for inner in list(call.walk())[1:]:  # one that keeps state, too, is part of this one
            covered.add(id(inner))
            own, inside = _slots(inner.own(), changed.get(inner.module, {}))
            slots, grows = slots + own, grows or inside
        if grows:
            raise StateRefused(f"{path} keeps recurrent state and K/V in one forward")
        if not path:
            raise StateRefused(
                f"the state {slots[0].name} is kept by the model's own forward, not by a part of it"
            )
        found[call.module] = slots
    return found


def _attribute_slots(
    attributes: list[dict[nn.Module, Changed]], passes: list[list[_Entered]], names: dict[nn.Module, str]
) -> dict[nn.Module, list[Slot]]:
    """The slots that modules keep in attributes of their own; those of parts belong to the outermost."""
    found: dict[nn.Module, list[Slot]] = {}
    by_name = {name: module for module, name in names.items()}
    calls = [call for top in passes[0] for call in top.walk()]
    for module, changes in attributes[0].items():
        slots, _ = _slots(changes, attributes[1].get(module, {}))
        if not slots:
            continue
        parts = names[module].split(".")
        prefixes = [".".join(parts[:n]) for n in range(1, len(parts))]
        outer = next((by_name[p] for p in prefixes if by_name.get(p) in found), module)
        # A module that also fills the cache is attention with something beside it: not to be hidden.
        if any(call.module is outer and call.all() for call in calls) or not names[module]:
            continue
        inside = names[module].removeprefix(names[outer]).strip(".")
        way = tuple(("attr", part) for part in inside.split(".") if part)
        found.setdefault(outer, []).extend(
            Slot((*way, *slot.steps), slot.shape, slot.dtype) for slot in slots
        )
    return found


def _templates(
    slots: dict[nn.Module, list[Slot]], in_modules: dict[nn.Module, list[Slot]], run: Run
) -> dict[nn.Module, State]:
    """One more pass, which copies the cache before and after each mixer's call."""
    states: dict[nn.Module, State] = {}
    before: dict[nn.Module, list[object]] = {}

    def holder(module: nn.Module, args: Any, kwargs: Any) -> object | None:
        """The cache that has the module's slots."""
        for cache in _caches(args, kwargs):
            have = {steps for steps, _ in tensors_of(cache)}
            if all(slot.steps in have for slot in slots[module]):
                return cache
        return None

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in slots:
            before[module] = [copy.deepcopy(cache) for cache in _caches(args, kwargs)]

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        caches = _caches(args, kwargs)
        if module in slots:
            cache = holder(module, args, kwargs)
            assert cache is not None, "the slots were found in this cache"
            empty = before[module][next(i for i, known in enumerate(caches) if known is cache)]
            arguments = template((args, kwargs), cache)[0]
            states[module] = State(arguments, tuple(slots[module]), empty, copy.deepcopy(cache), ())
        else:
            own = tuple(in_modules[module])
            arguments = template((args, kwargs), caches[0] if caches else None)[0]
            states[module] = State(arguments, own, None, None, initial[module])

    initial = {module: tuple(_initial(slot, module) for slot in own) for module, own in in_modules.items()}
    with _hooked([*slots, *in_modules], enter, leave):
        run(*_SIZES[0])
    return states


def _initial(slot: Slot, module: nn.Module) -> Any:
    try:
        value = slot.get(module)
    except (AttributeError, KeyError, IndexError):
        raise StateRefused(f"the state {slot.name} does not exist before the first token") from None
    return value.clone() if isinstance(value, Tensor) else value


_INTERNAL = frozenset(nn.Module().__dict__)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[Callable[[], dict[nn.Module, Changed]]]:
    """What modules keep comes back; yields a function that lists the tensors that changed.

    That is attributes, buffers and submodules, what lies in lists, dicts and plain objects, and the values of tensors.
    """
    saved = {
        module: (_own(module), dict(module._buffers), dict(module._modules)) for module in model.modules()
    }
    held = {module: _may_hold(plain | buffers) for module, (plain, buffers, _) in saved.items()}
    marks = {module: _Marks([_Attributes(values)]) for module, values in held.items() if values}
    nothing = _Marks([])
    copies = [
        (tensor, version, tensor.detach().clone())
        for mark in marks.values()
        for tensor, version in mark.tensors.values()
        if not tensor.is_meta
    ]
    inside = _contents([plain for plain, _, _ in saved.values()])

    def changes() -> dict[nn.Module, Changed]:
        found = {}
        for module in saved:
            values = _may_hold(_own(module) | module._buffers)
            if values or module in marks:
                found[module] = marks.get(module, nothing).changed([_Attributes(values)])
        return {module: changed for module, changed in found.items() if changed}

    try:
        yield changes
    finally:
        for module, (plain, buffers, modules) in saved.items():
            for name in set(_own(module)) - set(plain):
                del module.__dict__[name]
            module.__dict__.update(plain)
            both: list[tuple[Any, Any]] = [(module._buffers, buffers), (module._modules, modules)]
            for kept, before in both if not isinstance(module, torch.jit.ScriptModule) else ():  # fixed there
                kept.clear()
                kept.update(before)
        for container, content in inside:
            _put_back(container, content)
        for tensor, version, copied in copies:
            if tensor._version != version or not torch.equal(tensor, copied):  # `.data` counts no versions
                tensor.detach().copy_(copied)


def _contents(roots: Sequence[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Every list, dict and plain object that modules hold in attributes, with a copy of what is in it."""
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    stack: list[Any] = [value for root in roots for value in root.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            found.append((value, dict(value)))
            stack += value.values()
        elif isinstance(value, (list, set, deque)):
            found.append((value, list(value)))
            stack += value
        elif isinstance(value, (tuple, frozenset)):
            stack += value
        if isinstance(getattr(value, "__dict__", None), dict):
            found.append((vars(value), dict(vars(value))))
            stack += vars(value).values()
    return found


_LEAVES = (
    *(str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, Tensor, nn.Module),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)


def _put_back(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        same = len(container) == len(content) and all(
            container.get(k, content) is v for k, v in content.items()
        )
    else:
        same = len(container) == len(content) and all(a is b for a, b in zip(container, content, strict=True))
    if same:
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


def _own(module: nn.Module) -> dict[str, Any]:
    """Attributes that are not torch's own bookkeeping."""
    return {name: value for name, value in vars(module).items() if name not in _INTERNAL}


def _may_hold(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a module's attributes in which tensors may lie: most modules have numbers and names alone."""
    return {name: value for name, value in values.items() if not isinstance(value, NONE)}


class _Attributes:
    """A module's own attributes as an object's, so that the ways to its tensors are the module's."""

    def __init__(self, values: dict[str, Any]):
        self.__dict__.update(values)
