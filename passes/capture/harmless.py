"""Which changes that a forward makes do no harm to what a later forward computes.

A graph computes what one forward of the model, as it is now, computes. If a forward changes something that the next one
reads, the next may compute something else, and no graph says what. A change does no harm where

    nobody looks    the next forward writes the place before it reads it, or only counts it up or appends to it. Shown
                    by a forward in which every access to the place is seen: if what was changed is never read, the
                    next forward does what this one did, and so do all later ones.
    a cache         of something that the length alone decides (RoPE tables, masks): what is kept is made of no token
                    (seen by following the tokens through every operator), the same call again changes nothing any
                    more, and lengths in different orders give what a fresh model gives for each.

Everything else is refused with its name. So are random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompile.errors import ModelError
from kvcompile.kernels.ops.opaque import OpaqueModule
from kvcompile.passes.capture.changes import Place, Snapshot
from kvcompile.passes.capture.watching import watched
from kvcompile.passes.graph import module_path, source_line
from kvcompile.passes.recurrent.state import attributes_restored

# Operators that read the shape of their tensor argument and nothing else.
_SHAPE_ONLY = frozenset(
    "aten::" + name
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)
_TOKENS = 5
_LONG = 512  # no run is longer
_ORDERS = ((9, _TOKENS), (_TOKENS, 9, _TOKENS), (17, 2, _TOKENS), (3, 40, 7, _TOKENS))


class Calls(Protocol):
    """How the model is called."""

    def inputs(self, batch: int, tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
        """Token ids, and what else the graph takes."""

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        """One eager forward."""


def check_changes(
    model: nn.Module, calls: Calls, sizes: Sequence[tuple[int, int]]
) -> tuple[list[Any], tuple[Place, ...], tuple[Place, ...]]:
    """Refuse a model whose forward changes what a later forward reads.

    Returns what it gives for each of `sizes` (sequences, tokens), the places whose tensors are written to (whether
    these are read is seen in the graph), and all that it changes.

    Raises:
        ModelError: with the name of what is changed.
    """
    results = []
    read: dict[Place, None] = {}
    written: dict[Place, None] = {}
    all_changed: dict[Place, None] = {}
    for size in sizes:
        with attributes_restored(model), _rng() as drawn:
            before = Snapshot(model)
            results.append(calls(calls.inputs(*size)))
            if drawn() and (drawn() != _PYTHON or not _thrown_away(calls, size)):
                raise ModelError(
                    f"the model's forward draws random numbers of {drawn()}: each call gives another result. "
                    "Switch them off where the model is not trained"
                )
            changed = before.changed()
            all_changed |= dict.fromkeys(changed)
            hidden = [place for place in changed if before.unnoticed(place)]
            if hidden:
                raise ModelError(
                    f"the model's forward writes to the data of {hidden[0]}, which tracing cannot follow; assign"
                    " to it, or keep nothing in the model where it is not trained"
                )
            inside = [place for place in changed if before.in_place(place)]
            written |= dict.fromkeys(inside)
            rest = [place for place in changed if place not in inside]
            if rest:
                read |= dict.fromkeys(_read(rest, calls, size))
    if read:
        with attributes_restored(model):
            problem = _no_cache(model, list(read), calls)
        if problem:
            names = ", ".join(str(place) for place in read)
            raise ModelError(
                f"the model's forward changes {names}, and a later forward reads it: {problem}. A graph computes what"
                " the model computes as it is now. Give the forward what it needs as an argument, or keep nothing"
                " in the model where it is not trained"
            )
    return results, tuple(written), tuple(all_changed)


def check_hidden_writes(written: Sequence[Place], opaques: Sequence[OpaqueModule]) -> None:
    """Refuse writes to tensors in modules that the graph does not look into; what the cache carries is no such.

    Raises:
        ModelError: with the name of what is written to.
    """
    for record in opaques:
        inside = {id(part) for part in record.module.modules()}
        found = [place for place in written if id(place.owner) in inside]
        if record.state is None and found:
            raise ModelError(
                f"the model's forward writes to {found[0]}, in a module that runs as Python ({record.path}: "
                f"{record.reason}); whether a later forward reads it cannot be seen"
            )


def _read(changed: Sequence[Place], calls: Calls, size: tuple[int, int]) -> list[Place]:
    """The places that a forward reads before it has written them."""
    modules = [place for place in changed if isinstance(place.owner, nn.Module)]
    others = [place for place in changed if not isinstance(place.owner, nn.Module)]
    try:
        with watched(modules) as seen:
            calls(calls.inputs(*size))
            read = seen()
    except Exception:  # somebody did with what stands for a value what it cannot do: that is to read it
        return list(changed)
    return [*(place for place in modules if place in read), *others]


def _no_cache(model: nn.Module, places: list[Place], calls: Calls) -> str:
    """Why the places are no cache of what the length alone decides; empty where they are."""
    given = calls.inputs(1, _TOKENS)
    with attributes_restored(model), Tainted() as tainted:
        tainted.mark(given[0])
        calls(given)
        for place in places:
            if any(
                tainted.has(leaf) for leaf in pytree.tree_leaves(place.held()) if isinstance(leaf, Tensor)
            ):
                return f"{place} is made of the tokens"
        kept = Snapshot(model)
    for value in (0, 1):  # numbers made of tokens
        with attributes_restored(model):
            calls((torch.full_like(given[0], value), *given[1:]))
            for place in places:
                if isinstance(place.held(), (bool, int, float)) and not _same_value(kept, place):
                    return f"{place} is made of the tokens"
    with attributes_restored(model):
        calls(given)
        calls(calls.inputs(1, _TOKENS, 1))
        settled = Snapshot(model)
        calls(given)
        again = set(settled.changed())
        moving = [place for place in places if place in again and not _same_value(settled, place)]
        if moving:
            return f"{moving[0]} changes with every call"
    return _orders(model, places, calls)


def _orders(model: nn.Module, places: list[Place], calls: Calls) -> str:
    """Whether lengths in other orders give other results."""
    limits = [
        n for place in places for n in pytree.tree_leaves(place.held()) if type(n) is int and 1 < n < _LONG
    ]
    around = [(limit + 1, limit, _TOKENS, limit + 1) for limit in dict.fromkeys(limits)]
    fresh: dict[int, list[Tensor]] = {}
    for order in (*_ORDERS, *around):
        with attributes_restored(model):
            try:
                found = [(tokens, _tensors(calls(calls.inputs(1, tokens, 2)))) for tokens in order]
            except Exception:  # longer than the model allows
                continue
        for tokens, result in found:
            if tokens not in fresh:
                with attributes_restored(model):
                    fresh[tokens] = _tensors(calls(calls.inputs(1, tokens, 2)))
            if not all(
                a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
                for a, b in zip(result, fresh[tokens], strict=True)
            ):
                return f"{tokens} tokens give another result after lengths {', '.join(map(str, order))}"
    return ""


def _same_value(settled: Snapshot, place: Place) -> bool:
    """Whether new tensors in a place hold what the old ones held."""
    old = [leaf[-1] for leaf in settled.holds.get(place, [])]
    now = [leaf[-1] for leaf in Snapshot(settled.model, copies=False).holds.get(place, [])]
    if len(old) != len(now):
        return False
    for a, b in zip(old, now, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            a = settled.copies.get(id(a), a)
            if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
                return False
        elif isinstance(a, (bool, int, float, str, bytes, type(None))):
            if a != b:
                return False
        elif type(a) is not type(b):
            return False
    return True


class Tainted(TorchDispatchMode):
    """Follows what is made of marked tensors through every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, Any] = {}

    def mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage  # kept alive: an address is not used twice

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func._schema.name not in _SHAPE_ONLY and any(self.has(leaf) for leaf in given):
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.mark(leaf)
        return result


@contextmanager
def _rng() -> Iterator[Callable[[], str]]:
    """Whether Python or numpy drew random numbers; their states, and torch's, come back."""
    import numpy

    python, own = random.getstate(), torch.get_rng_state()
    numbers: Any = numpy.random.get_state()

    def drawn() -> str:
        if random.getstate() != python:
            return _PYTHON
        now: Any = numpy.random.get_state()
        same = now[2:] == numbers[2:] and bool((now[1] == numbers[1]).all())
        return "" if same else "numpy"

    try:
        yield drawn
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(own)


_PYTHON = "Python's `random`"


class _Drawn:
    """A random number that nobody may use: whatever is done with it ends the forward."""

    def _used(self, *_: Any) -> Any:
        raise TypeError("a random number is used")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __float__ = __int__ = __index__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = (
        _used
    )
    __hash__ = None  # type: ignore[assignment]


_DRAWS = ("random", "uniform", "randint", "randrange", "gauss", "normalvariate", "choice", "getrandbits")


def _thrown_away(calls: Calls, size: tuple[int, int]) -> bool:
    """Whether a forward draws numbers of Python's `random` and uses none (layers that training drops)."""
    own = {name: getattr(random, name) for name in _DRAWS}
    before = random.getstate()
    try:
        for name in _DRAWS:
            setattr(random, name, lambda *_, **__: _Drawn())
        calls(calls.inputs(*size))
    except Exception:  # whatever is done with it
        return False
    finally:
        for name, function in own.items():
            setattr(random, name, function)
    return random.getstate() == before


def _tensors(output: Any) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def check_random(graph_module: GraphModule) -> None:
    """Refuse random numbers in a cleaned graph.

    Raises:
        ModelError: with the operator and its line.
    """
    for node in graph_module.graph.nodes:
        target = node.target
        if (
            not isinstance(target, torch._ops.OpOverload)
            or torch.Tag.nondeterministic_seeded not in target.tags
        ):
            continue
        given = {a.name: value for a, value in zip(target._schema.arguments, node.args, strict=False)}
        given |= node.kwargs
        silent = any(given.get(name) is False for name in ("train", "training"))
        chance = [given[name] for name in ("p", "dropout_p") if name in given]
        if silent or (chance and not any(chance)) or (not chance and _defaults(target)):
            continue
        raise ModelError(f"{target} draws random numbers{_where(node)}: each call gives another result")


def _defaults(target: Any) -> bool:
    """Whether an operator's chance of dropping is none where it is not given."""
    return any(a.name == "dropout_p" and not a.default_value for a in target._schema.arguments)


def _where(node: Node) -> str:
    parts = [part for part in (module_path(node), source_line(node)) if part]
    return f" in {', '.join(parts)}" if parts else ""


def check_writes(graph_module: GraphModule, written: Sequence[str]) -> None:
    """Refuse a cleaned graph that reads a buffer which the forward writes to.

    written: names of what is written to

    Raises:
        ModelError: with the buffer's name.
    """
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and node.target in written:
            user = next(iter(node.users), node)
            raise ModelError(
                f"the model's forward changes the buffer {node.target}, and its result depends on what was in it before"
                f"{_where(user)}: each call gives another result. Give the forward what it needs as an argument, or"
                " keep nothing in the model where it is not trained"
            )
