"""Own positions: whether a model that takes `position_ids` counts 0, 1, 2, .. itself where it is given none.

Its users call it without; a graph that takes them gets 0, 1, 2, .. from the cache. Both are the same where a forward
without does what a forward with them does, but for how positions are made, and these are made of the length alone:

    arange(S)[None]                         position_ids[:, :S] of a buffer that holds 0, 1, 2, ..
    (ones.cumsum(1) * ones - 1).long()      and other sums and products of these

Seen by noting every operator of the two forwards. What one does more than the other may only make positions, as above:
that is a polynomial of a low degree in i and S, of which a few tokens of two lengths tell whether it is i. Numbers made
of token ids (positions that start again behind a separator, or skip padding), a limit, a remainder, a rounding are no
such thing: a model that has them makes its positions in the graph.

The same is asked of `logits_to_keep`: with the indices of all tokens a forward may do no more than take these. What a
graph is given together is asked for together: what is compared is then the very call that is traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompile.passes.recurrent.state import attributes_restored
from kvcompile.util.serial import as_the_caller

Memory = frozenset[int]  # which storages

# Operators that take the shape of what they are given, and nothing else.
_LIKE = frozenset(
    f"aten::{name}"
    for name in ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "new_empty")
)
_MAKING = _LIKE | {
    f"aten::{name}"
    for name in (
        *("arange", "ones", "zeros", "full", "add", "sub", "rsub", "mul", "neg", "cumsum"),
        *("_to_copy", "clone", "repeat", "stack"),
    )
}
_COUNTS = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes that hold every position
_AS_GIVEN = ("aten::_to_copy", "aten::clone")  # what they give is what they are given
_TAKE = ("aten::index", "aten::index_select")
_SMALL = 4096  # bytes
_LOOKS = ("aten::_local_scalar_dense", "aten::equal")  # by which Python gets to know a value


@dataclass(slots=True)  # not frozen: there are some thousand of them
class _Call:
    """One operator of a forward. key: what it computes, whatever dimensions of size one it has."""

    name: str
    key: tuple[Any, ...]
    view: bool
    reads: Memory
    writes: Memory
    counts: bool  # whether its results may be positions


@dataclass(frozen=True)
class _Forward:
    """All operators of a forward. held: the storages by their addresses, kept alive: none may be used twice."""

    calls: Sequence[_Call]
    outputs: Sequence[Tensor]
    held: Mapping[int, torch.UntypedStorage]

    @property
    def results(self) -> Memory:
        return frozenset(map(_memory, self.outputs))

    def live(self, looked: bool) -> list[_Call]:
        """The operators that the results need; looked: and what Python looks at."""
        wanted, found = set(self.results), []
        for call in reversed(self.calls):
            if call.writes & wanted or (looked and call.name in _LOOKS):
                wanted |= call.reads
                found.append(call)
        return found[::-1]

    def without(self, indices: int) -> _Forward:
        """The same with what `indices` take for a view of what they take it from."""
        calls = [
            replace(call, view=True) if call.name in _TAKE and indices in call.reads else call
            for call in self.calls
        ]
        return replace(self, calls=calls)


class Alone:
    """The forwards of a model that is given ids alone: each is run and noted once, whatever it is compared with.

    first: the name of the parameter that takes the ids
    """

    def __init__(self, model: nn.Module, first: str):
        self.model, self.first = model, first
        self._noted: dict[int, tuple[Tensor, _Forward]] = {}  # by tokens

    def same_as(self, ids: Tensor, extra: Mapping[str, Tensor]) -> bool:
        """Whether a forward of `ids` [1, S] alone does what it does with more arguments, each 0, 1, 2, ..

        extra: `position_ids` [1, S], `logits_to_keep` [S], or both
        """
        known = self._noted.get(ids.shape[1])
        if known is None or not torch.equal(known[0], ids):
            known = self._noted[ids.shape[1]] = (ids, _noted(self.model, {self.first: ids}))
        given = _noted(self.model, {self.first: ids, **extra})
        if "logits_to_keep" in extra:
            given = given.without(_memory(extra["logits_to_keep"]))
        return _alike(known[1], given, self.model, frozenset(map(_memory, extra.values())))


def _alike(alone: _Forward, given: _Forward, model: nn.Module, counted: Memory) -> bool:
    tables = frozenset(_memory(buffer) for buffer in model.buffers() if _counts(buffer))
    held = {**alone.held, **given.held}
    # A forward that is given positions may look whether these are of one sequence; 0, 1, 2, .. are.
    return (
        _close(alone.outputs, given.outputs)
        and _only_makes(alone.live(looked=True), given.live(looked=True), tables, held)
        and _only_makes(given.live(looked=False), alone.live(looked=True), tables | counted, held)
    )


def _close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether both forwards gave the same, to rounding: what they do is compared elsewhere."""
    pairs = zip(*([t for t in outputs if t.is_floating_point()] for outputs in (ours, theirs)), strict=False)
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-2, atol=1e-3) for one, other in pairs
    )


def _noted(model: nn.Module, inputs: Mapping[str, Tensor]) -> _Forward:
    with attributes_restored(model), as_the_caller(), _Noting() as noting:
        out = model(**inputs)
    return _Forward(noting.calls, _tensors(out), noting.held)


@dataclass(frozen=True)
class _Known:
    """What an operator's schema says; arguments: all names, in order; aliases: whether a result shares memory."""

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    aliases: bool


@cache
def _known(func: Any) -> _Known:
    schema = func._schema
    return _Known(
        schema.name,
        tuple(a.name for a in schema.arguments),
        tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write),
        any(a.alias_info for a in schema.returns),
    )


class _Noting(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.held: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = _known(func)
        name = known.name
        like = name in _LIKE
        made = [result] if isinstance(result, Tensor) else _tensors_in(result)
        values = _flat((*args, *kwargs.values()) if kwargs else args)
        used = [x for x in values if isinstance(x, Tensor)]
        writes, reads = self._hold(made), self._hold(used)
        if known.written:
            given = dict(zip(known.arguments, args, strict=False)) | kwargs
            writes |= self._hold(_tensors_in([given[name] for name in known.written if name in given]))
        shapes = tuple([(t.dtype, tuple([n for n in t.shape if n != 1])) for t in made])
        told = () if like or name in _AS_GIVEN else values
        numbers = tuple([repr(x) for x in told if isinstance(x, (bool, int, float))])
        self.calls.append(
            _Call(
                name,
                (name, shapes, numbers),
                known.aliases and not known.written,
                frozenset() if like else reads,
                writes,
                name in _MAKING and all(t.dtype in _COUNTS for t in made) and _whole(values),
            )
        )
        return result

    def _hold(self, tensors: Sequence[Tensor]) -> Memory:
        """The memory of tensors, which stays alive from now on."""
        if len(tensors) == 1:
            storage = tensors[0].untyped_storage()
            self.held[storage._cdata] = storage
            return frozenset((storage._cdata,))
        storages = {storage._cdata: storage for storage in [tensor.untyped_storage() for tensor in tensors]}
        self.held.update(storages)
        return frozenset(storages)


def _only_makes(calls: Sequence[_Call], others: Sequence[_Call], counted: Memory, held: Any) -> bool:
    """Whether what `calls` do and `others` do not makes positions, of lengths and of what is `counted` already."""
    made, rest = set(counted), Counter[tuple[Any, ...]]()
    for call in calls:
        if (call.view or call.counts) and call.reads <= made:
            made |= call.writes
        elif not call.view:
            rest[call.key] += 1
    ours, theirs = _kept(calls), _kept(others)
    more = Counter(_content(held[storage]) for storage in ours - theirs - made)
    return rest <= Counter(call.key for call in others if not call.view) and more <= Counter(
        _content(held[storage]) for storage in theirs - ours
    )


def _content(storage: torch.UntypedStorage) -> Any:
    """What tells constants apart that a forward makes of numbers, anew each time."""
    return bytes(storage.tolist()) if storage.nbytes() <= _SMALL else storage._cdata


def _kept(calls: Sequence[_Call]) -> Memory:
    """What is read and was there before: weights, buffers, inputs."""
    read: set[int] = set()
    written: set[int] = set()
    for call in calls:
        read |= call.reads - written
        written |= call.writes - read
    return frozenset(read)


def _counts(table: Tensor) -> bool:
    """Whether a buffer holds 0, 1, 2, .."""
    size = table.shape[-1] if table.dim() else 0
    whole = table.dtype in (torch.int32, torch.int64) and 0 < size == table.numel()
    return whole and torch.equal(table.flatten(), torch.arange(size, dtype=table.dtype, device=table.device))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _flat(values: Any) -> list[Any]:
    """The leaves of an operator's arguments, in order: these nest in lists, tuples and dicts alone."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _flat(value)
        elif isinstance(value, dict):
            found += _flat(value.values())
        else:
            found.append(value)
    return found


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in _flat((values,)) if isinstance(leaf, Tensor)]


def _whole(values: Sequence[Any]) -> bool:
    """Whether all numbers among arguments are whole."""
    return all(x.is_integer() for x in values if isinstance(x, float))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
