"""Steps of equal modules are traced once.

Two modules have the same step where their parts are of the same classes of transformers or torch, with weights of the
same forms, no attribute differs but for numbers (the layer's, by which it finds its state in a cache), and a step of
both runs the same operators on the same operands with the same numbers: seen by running it, for each number of
sequences that a graph is compared at. The second gets the first one's graph, with its own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompile.kernels.ops.opaque import OpaqueModule
from kvcompile.passes.capture.equal_layers import Layer, tensors
from kvcompile.passes.capture.step_graph import StepGraph
from kvcompile.passes.capture.step_proof import PROMPT, buffers

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class _Kind:
    record: OpaqueModule
    layer: Layer
    logs: dict[int, tuple[Any, ...] | None]  # by the number of sequences


class Known:
    """The modules that were traced, to find one that is equal."""

    def __init__(self) -> None:
        self._kinds: list[_Kind] = []

    def add(self, record: OpaqueModule) -> None:
        """Note a module whose steps are known now."""
        layer = Layer.of(record.path, record.module)
        if layer is not None and any(isinstance(step, StepGraph) for step in record.steps.values()):
            self._kinds.append(_Kind(record, layer, {}))

    def like(self, record: OpaqueModule, one_sequence: bool) -> StepGraph | None:
        """The graph of an equal module, with this one's weights; None: there is none."""
        layer = Layer.of(record.path, record.module)
        if layer is None or layer.hooked():
            return None
        own = tensors(record.module)
        for kind in self._kinds:
            known = kind.record.steps.get(one_sequence)
            if not isinstance(known, StepGraph) or not _alike(kind, record, layer):
                continue
            rows = (1,) if one_sequence else (2, 3)
            if own.keys() >= set(known.names) and all(_same_log(kind, record, count) for count in rows):
                return replace(known, weights=tuple(own[name].detach() for name in known.names))
        return None


def _alike(kind: _Kind, record: OpaqueModule, layer: Layer) -> bool:
    first = kind.record
    differing = kind.layer.differences(layer)
    if differing is None or any(
        type(of.attributes.get(key)) is not int for key in differing for of in (kind.layer, layer)
    ):
        return False
    ours, theirs = first.state, record.state
    if (ours is None) != (theirs is None) or (first.inputs, first.outputs) != (record.inputs, record.outputs):
        return False
    forms = [(one.arguments.spec, _leaves(one.arguments.leaves)) for one in (first, record)]
    if ours is not None and theirs is not None:
        forms = [(one.arguments.spec, _leaves(one.arguments.leaves)) for one in (ours, theirs)]
        slots = [[(slot.shape, slot.dtype) for slot in one.slots] for one in (ours, theirs)]
        if slots[0] != slots[1] or ours.feed != theirs.feed:
            return False
    return forms[0] == forms[1]


def _leaves(leaves: Sequence[Any]) -> list[Any]:
    """Numbers as they are; of anything else, which object it is."""
    return [
        (type(leaf), leaf if isinstance(leaf, _PLAIN) or _is_argument(leaf) else id(leaf)) for leaf in leaves
    ]


def _is_argument(leaf: Any) -> bool:
    return type(leaf).__name__ == "Argument"


def _same_log(kind: _Kind, record: OpaqueModule, rows: int) -> bool:
    if rows not in kind.logs:
        kind.logs[rows] = _log(kind.record, rows)
    first = kind.logs[rows]
    return first is not None and first == _log(record, rows)


def _log(record: OpaqueModule, rows: int) -> tuple[Any, ...] | None:
    """What a step runs; None where it takes a tensor of unknown origin."""
    inputs = record.example.tokens(record, rows, PROMPT, 1)
    state = buffers(record, rows, inputs[0].device)  # whatever is in it, what runs is the same
    noting = _Noting({id(t): ("weight", name) for name, t in tensors(record.module).items()})
    noting.known |= {id(t): ("input", at) for at, t in enumerate((*inputs, *state))}
    noting.held += [*inputs, *state]
    with noting:
        results = record.next_token(inputs, state)
    if noting.unknown:
        return None
    return (*noting.lines, tuple(noting.known.get(id(result)) for result in results))


class _Noting(TorchDispatchMode):
    """Notes every operator, with where its operands come from."""

    def __init__(self, known: dict[int, tuple[str, Any]]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.unknown = known, False
        self.lines: list[tuple[Any, ...]] = []
        self.held: list[Tensor] = []  # an id means nothing when its tensor is gone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = tuple(map(self._told, pytree.tree_leaves((args, kwargs or {}))))
        result = func(*args, **(kwargs or {}))
        number = len(self.lines)
        self.lines.append((str(func), taken))
        for at, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self.held.append(leaf)
                self.known.setdefault(id(leaf), (f"result {number}", at))
        return result

    def _told(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            self.held.append(leaf)
            self.unknown |= id(leaf) not in self.known
            return self.known.get(id(leaf))
        if not isinstance(leaf, _PLAIN):
            self.unknown = True
        return (type(leaf).__name__, leaf if isinstance(leaf, _PLAIN) else None)
