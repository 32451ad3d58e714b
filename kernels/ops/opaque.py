"""`kvcompile::opaque` and `kvcompile::mixer`: modules of the model that the graph does not look into.

    opaque(inputs, key)              the module as the model calls it, over whole sequences
    mixer(inputs, state, rows, key)  the same for the next tokens only, with its recurrent state in `state`, updated
                                     in place

Both run the module's own Python. Where routing depends on values, or a scan is a loop over the sequence, no graph with
free sizes can say what that Python does. `key` names an `OpaqueModule`, which the captured model owns: when
it goes, the key means nothing any more.

Sizes are not traced but learnt from calls: each dimension of an input or a result is a whole multiple of 1, B, S or
B * S (B sequences of S tokens).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kvcompile.specs import Feed

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define("opaque(Tensor[] inputs, str key) -> Tensor[]")
_LIB.define("mixer(Tensor[] inputs, Tensor(a!)[] state, Tensor rows, str key) -> Tensor[]")

_KNOWN: weakref.WeakValueDictionary[str, OpaqueModule] = weakref.WeakValueDictionary()
_NUMBER = count()


@dataclass(frozen=True)
class Dim:
    """A size: `factor` times 1, B, S or B * S (`base` "", "B", "S", "BS")."""

    factor: int
    base: str = ""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a call, as far as all calls agree."""

    dims: tuple[Dim, ...]
    dtype: torch.dtype

    def axis(self, base: str) -> int | None:
        """The dimension that is exactly B or S; None where there is none."""
        return next((i for i, dim in enumerate(self.dims) if dim == Dim(1, base)), None)


@dataclass(frozen=True)
class Argument:
    """Stands for the tensor number `index` in a template."""

    index: int


CACHE = object()  # stands for the cache in a template


@dataclass(frozen=True)
class Template:
    """Nested tuples, lists and dicts with tensors (and the cache) left open."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def fill(self, tensors: Sequence[Tensor], cache: object = None) -> Any:
        """The nested values with `tensors` and `cache` in their places."""
        return pytree.tree_unflatten(self.fill_leaves(tensors, cache), self.spec)

    def fill_leaves(self, tensors: Sequence[Tensor], cache: object = None) -> list[Any]:
        """The same, flat."""
        return [
            tensors[leaf.index] if isinstance(leaf, Argument) else cache if leaf is CACHE else leaf
            for leaf in self.leaves
        ]


def template(values: Any, cache: object = None) -> tuple[Template, list[Tensor]]:
    """`values` without its tensors, and these. Only plain containers are looked into."""
    leaves, spec = pytree.tree_flatten(values, is_leaf=lambda x: not isinstance(x, (tuple, list, dict)))
    tensors: list[Tensor] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[i] = Argument(len(tensors))
            tensors.append(leaf)
        elif cache is not None and leaf is cache:
            leaves[i] = CACHE
    return Template(spec, tuple(leaves)), tensors


@dataclass(frozen=True)
class Slot:
    """One tensor of state: the attributes and items that lead to it, from the cache object or from the module.

    shape: of one sequence; the tensor itself is [B, *shape].
    """

    steps: tuple[tuple[str, Any], ...]  # ("attr", name) or ("item", key)
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return ".".join(str(step) for _, step in self.steps)

    def get(self, root: Any) -> Any:
        for step in self.steps:
            root = follow(root, step)
        return root

    def set(self, root: Any, value: Any) -> None:
        for step in self.steps[:-1]:
            root = follow(root, step)
        kind, name = self.steps[-1]
        if kind == "attr":
            setattr(root, name, value)
        else:
            root[name] = value


def follow(root: Any, step: tuple[str, Any]) -> Any:
    kind, name = step
    return getattr(root, name) if kind == "attr" else root[name]


@dataclass
class State:
    """How a module's recurrent state gets in and out.

    arguments: of a call that uses the state
    slots:     the tensors that carry it
    empty:     a cache object before the module's first tokens; None where the state lies in the module itself
    warm:      the same after some tokens: its flags say that there is a state
    initial:   what the slots of a module hold before its first tokens
    feed:      how tokens are given to it that continue from the state
    pending:   shapes (without B) and dtypes of what `feed` "in pairs" keeps besides: each input of the token that
               waits, and whether one waits
    spread:    relative difference between the ways of feeding the same tokens, as measured
    """

    arguments: Template
    slots: tuple[Slot, ...]
    empty: object | None
    warm: object | None
    initial: tuple[Any, ...]
    feed: Feed = "together"
    pending: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    spread: float = 0.0

    def buffers(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape of one sequence, and dtype of every tensor that must be kept."""
        waits = [f"pending.{i}" for i in range(len(self.pending))]
        own = [(slot.name, slot.shape, slot.dtype) for slot in self.slots]
        return own + [(name, *kept) for name, kept in zip(waits, self.pending, strict=True)]


class OpaqueModule:
    """A call of a module that runs as Python. Its weights are the model's own."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        forward: Callable[..., Any],
        reason: str,
        arguments: Template,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        state: State | None = None,
    ):
        """
        path:      of the module in the model
        forward:   the module's own: while a model is traced, `module.forward` is the op
        reason:    why the graph does not look into it
        arguments: of a call over whole sequences, without a cache
        """
        self.path, self.module, self.reason, self.state = path, module, reason, state
        self.forward = forward
        self.kept = tuple(range(len(inputs)))  # of the inputs that tracing found
        self.arguments, self.inputs, self.outputs = arguments, tuple(inputs), tuple(outputs)
        # Its calls of one token as graphs, by whether they are of one sequence, or why there is none
        # (passes/capture/python_step.py); and inputs over some tokens, by which others are compared with it.
        self.steps: dict[bool, Any] = {}
        self.example: Any = None
        self.key = f"{path}#{next(_NUMBER)}"
        self._modules = list(module.modules())
        _KNOWN[self.key] = self

    def __str__(self) -> str:
        return f"{self.path} ({type(self.module).__name__}): {self.reason}"

    def keep(self, kept: Sequence[int]) -> None:
        """Take only these of the inputs from now on, and None for the others.

        Raises:
            ValueError: with its cache, the module is called in another way than without.
        """
        places = [i for i, leaf in enumerate(self.arguments.leaves) if isinstance(leaf, Argument)]
        new: dict[int, Any] = dict.fromkeys(places)
        new |= {places[index]: Argument(number) for number, index in enumerate(kept)}

        def renumbered(arguments: Template) -> Template:
            leaves = tuple(new.get(i, leaf) for i, leaf in enumerate(arguments.leaves))
            extra = any(isinstance(leaf, Argument) and i not in new for i, leaf in enumerate(leaves))
            if extra or arguments.spec != self.arguments.spec:
                raise ValueError(f"{self.path} takes other arguments with a cache than without")
            return Template(arguments.spec, leaves)

        if self.state is not None:
            self.state.arguments = renumbered(self.state.arguments)
        self.arguments = renumbered(self.arguments)
        self.inputs, self.kept = tuple(self.inputs[index] for index in kept), tuple(kept)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Whole sequences from their start, without state."""
        if self.state is None or self.state.empty is not None:
            return self._call(self.arguments, inputs, None)
        saved = [slot.get(self.module) for slot in self.state.slots]
        try:
            return self._call(self.arguments, inputs, None)
        finally:
            for slot, value in zip(self.state.slots, saved, strict=True):
                slot.set(self.module, value)

    def ragged(self, inputs: Sequence[Tensor], pads: Sequence[int]) -> list[Tensor]:
        """As `run`, with pads[b] padded tokens on the left of sequence b; results at padding are zeros."""
        if not any(pads):
            return self.run(inputs)
        return self._by_row(inputs, pads, lambda row, part: self.run(part))

    def step(self, inputs: Sequence[Tensor], state: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        """The next S tokens of B sequences.

        Args:
            state: the tensors of `buffers`, updated in place; read only where tokens have been seen.
            rows: int64 [2, B] on the CPU: padded tokens on the left of each row, tokens it has seen before.
        """
        pads, seen = rows.tolist()
        if not any(pads) and not any(seen):
            return self._first(inputs, state)
        if not any(pads) and all(seen):
            return self._next(inputs, state)

        def one(row: int, part: list[Tensor]) -> list[Tensor]:
            own = [tensor[row : row + 1] for tensor in state]
            return self._next(part, own) if seen[row] else self._first(part, own)

        return self._by_row(inputs, pads, one)

    def next_token(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """As `step`, for one token of each of sequences that all have some and no padding."""
        return self.run(inputs) if self.state is None else self._next(inputs, state)

    def sizes(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """B, S and B * S of a call, from the shapes of its inputs."""
        found: dict[str, Any] = {}
        for spec, tensor in zip(self.inputs, inputs, strict=True):
            for dim, size in zip(spec.dims, tensor.shape, strict=True):
                if dim.base and dim.base not in found:
                    found[dim.base] = size if dim.factor == 1 else size // dim.factor
        if "BS" not in found and {"B", "S"} <= set(found):
            found["BS"] = found["B"] * found["S"]
        return found

    def tokens(self, inputs: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        """The inputs of some of the tokens."""
        return [_cut(t, s, "S", start, length) for t, s in zip(inputs, self.inputs, strict=True)]

    def joined(self, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Results of consecutive tokens as one; of what has no axis for them, the last."""
        return [
            parts[-1] if (axis := spec.axis("S")) is None else torch.cat(parts, dim=axis)
            for parts, spec in zip(zip(*pieces, strict=True), self.outputs, strict=True)
        ]

    def empty_outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the results' shapes."""
        sizes = self.sizes(inputs)
        return [
            inputs[0].new_empty(
                [dim.factor * sizes[dim.base] if dim.base else dim.factor for dim in spec.dims],
                dtype=spec.dtype,
            )
            for spec in self.outputs
        ]

    def _first(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """Tokens of sequences that have none yet."""
        assert self.state is not None
        if self.state.pending:
            state[-1].zero_()
        return self._with_state(inputs, state, copy.deepcopy(self.state.empty), self.state.initial)

    def _next(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """Tokens of sequences that have some."""
        assert self.state is not None
        if self.state.feed == "in pairs":
            return self._in_pairs(inputs, state)
        tokens = self.sizes(inputs)["S"]
        if tokens == 1 or self.state.feed == "together":
            return self._with_state(inputs, state, self.state.warm, state)
        pieces = []
        for token in range(tokens):
            part = self.tokens(inputs, token, 1)
            pieces.append(self._with_state(part, state, self.state.warm, state))
        return self.joined(pieces)

    def _in_pairs(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """Never one token alone: it is given twice, without an effect on the state, and again with the next."""
        assert self.state is not None
        warm, waiting = self.state.warm, state[-1].tolist()
        if len(set(waiting)) > 1:  # rows that started at different places
            return self._by_row(
                inputs,
                [0] * len(waiting),
                lambda row, part: self._in_pairs(part, [s[row : row + 1] for s in state]),
            )
        held = state[len(self.state.slots) : -1]
        running = [
            tensor for tensor, spec in zip(inputs, self.inputs, strict=True) if spec.axis("S") is not None
        ]
        if not waiting[0] and self.sizes(inputs)["S"] > 1:
            return self._with_state(inputs, state, warm, state)
        earlier = iter(held if waiting[0] else running)
        double = [
            tensor if (axis := spec.axis("S")) is None else torch.cat([next(earlier), tensor], dim=axis)
            for tensor, spec in zip(inputs, self.inputs, strict=True)
        ]
        if waiting[0]:
            state[-1].zero_()
            results = self._with_state(double, state, warm, state)
            tokens = self.sizes(inputs)["S"]
            return [_cut(r, s, "S", 1, tokens) for r, s in zip(results, self.outputs, strict=True)]
        scratch = [tensor.clone() for tensor in state]
        results = self._with_state(double, scratch, warm, scratch)
        for place, tensor in zip(held, running, strict=True):
            place.copy_(tensor)
        state[-1].fill_(1)
        return [_cut(r, s, "S", 0, 1) for r, s in zip(results, self.outputs, strict=True)]

    def _with_state(
        self, inputs: Sequence[Tensor], state: Sequence[Tensor], holder: object | None, values: Sequence[Any]
    ) -> list[Tensor]:
        """A call whose slots hold `values` before; what they hold after goes to `state`."""
        assert self.state is not None
        slots, root = self.state.slots, self.module if holder is None else holder
        fresh = holder is not None and values is not state  # an empty cache is as it should be
        saved = [] if fresh else [slot.get(root) for slot in slots]
        try:
            if not fresh:
                for slot, value in zip(slots, values, strict=False):
                    slot.set(root, value)
            results = self._call(self.state.arguments, inputs, holder)
            for slot, buffer in zip(slots, state, strict=False):  # behind them comes what waits
                value = slot.get(root)
                if value.shape != buffer.shape or value.dtype != buffer.dtype:
                    raise RuntimeError(
                        f"the state {slot.name} of {self.path} became {value.dtype}{tuple(value.shape)}, "
                        f"it was {buffer.dtype}{tuple(buffer.shape)}"
                    )
                if value is not buffer:
                    buffer.copy_(value)
        finally:
            for slot, value in zip(slots, saved, strict=False):
                slot.set(root, value)
        return results

    def call_with(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The results for the arguments of a call without a cache, flat."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.arguments.spec)
        with torch.no_grad(), _eval(self._modules):
            return template(self.forward(*args, **kwargs))[1]

    def _call(self, arguments: Template, inputs: Sequence[Tensor], cache: object | None) -> list[Tensor]:
        results = self.call_with(arguments.fill_leaves(inputs, cache))
        # An op's results must not share memory with what it was given.
        taken = {tensor.untyped_storage()._cdata for tensor in inputs}
        return [
            r.clone(memory_format=torch.contiguous_format)
            if r.untyped_storage()._cdata in taken
            else r.contiguous()
            for r in results
        ]

    def _by_row(
        self,
        inputs: Sequence[Tensor],
        pads: Sequence[int],
        call: Callable[[int, list[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """Each sequence by itself, without its padding."""
        outputs = [tensor.zero_() for tensor in self.empty_outputs(inputs)]
        tokens = self.sizes(inputs)["S"]
        for row, pad in enumerate(pads):
            if pad == tokens:
                continue
            part = [
                _cut(_cut(t, s, "B", row, 1), s, "S", pad, tokens - pad)
                for t, s in zip(inputs, self.inputs, strict=True)
            ]
            for out, spec, found in zip(outputs, self.outputs, call(row, part), strict=True):
                _cut(_cut(out, spec, "B", row, 1), spec, "S", pad, tokens - pad).copy_(found)
        return outputs


def find(key: str) -> OpaqueModule:
    """The module behind a key.

    Raises:
        RuntimeError: the captured model that owned it is gone.
    """
    found = _KNOWN.get(key)
    if found is None:
        raise RuntimeError(
            f"opaque module {key!r} is gone: keep the captured (or optimized) model that it is part of"
        )
    return found


def _cut(tensor: Tensor, spec: TensorSpec, base: str, start: int, length: int) -> Tensor:
    axis = spec.axis(base)
    return tensor if axis is None else tensor.narrow(axis, start, length)


@contextmanager
def _eval(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Eval mode, as the model was captured; flags that the owner has set come back."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _opaque(inputs: list[Tensor], key: str) -> list[Tensor]:
    return find(key).run(inputs)


def _mixer(inputs: list[Tensor], state: list[Tensor], rows: Tensor, key: str) -> list[Tensor]:
    return find(key).step(inputs, state, rows)


def _fake_opaque(inputs: list[Tensor], key: str) -> list[Tensor]:
    return find(key).empty_outputs(inputs)


def _fake_mixer(inputs: list[Tensor], state: list[Tensor], rows: Tensor, key: str) -> list[Tensor]:
    return find(key).empty_outputs(inputs)


_LIB.impl("opaque", _opaque, "CompositeExplicitAutograd")
_LIB.impl("mixer", _mixer, "CompositeExplicitAutograd")
torch.library.register_fake("kvcompile::opaque", _fake_opaque, lib=_LIB)
torch.library.register_fake("kvcompile::mixer", _fake_mixer, lib=_LIB)
opaque = torch.ops.kvcompile.opaque.default
mixer = torch.ops.kvcompile.mixer.default
