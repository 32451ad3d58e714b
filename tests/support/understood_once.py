"""Equal models of transformers, and of `tests/support/models.py`, are understood once in a session of tests.

Tracing takes most of what an `optimize` of a tiny model takes, and many tests build the same model anew. What was
understood of the first is copied for the others, with their own modules and weights in its place. Models of classes
that a test writes itself are understood each time, as is everything in tests of the passes (`ANEW` in
tests/conftest.py).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from kvcompile import pipeline
from kvcompile.passes.capture.capture import nothing
from kvcompile.pipeline import Front
from tests.support.models import TinyConfig

_OURS = "tests.support.models"
_OF_OTHERS = ("transformers.", "torch.", _OURS)
_LARGEST = 1 << 22  # weights of a model that is worth a copy
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")


def key_of(model: nn.Module) -> tuple[Any, ...] | None:
    """All that a model's graph can depend on; None: more than can be told."""
    ours = type(model).__module__ == _OURS
    if not ours and not type(model).__module__.startswith("transformers."):
        return None
    if torch.is_inference_mode_enabled():
        return None
    if sum(tensor.numel() for tensor in model.parameters()) > _LARGEST:
        return None
    found: list[Any] = [torch.get_default_dtype(), torch.is_autocast_enabled("cpu")]
    for name, module in model.named_modules():
        kind = type(module)
        if not kind.__module__.startswith(_OF_OTHERS) or any(vars(module).get(hooks) for hooks in _HOOKS):
            return None
        plain = []
        for attribute, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, tuple, list, TinyConfig, type(None))):
                plain.append((attribute, repr(value)))
                continue
            patched = callable(value) and not isinstance(value, (nn.Module, type)) and attribute == "forward"
            if patched or (ours and not attribute.startswith("_")):  # what the latter may mean, nobody says
                return None
        found.append((name, kind.__qualname__, kind.__module__, tuple(sorted(plain, key=str))))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (
            type(tensor) not in (nn.Parameter, torch.Tensor)
            or tensor.device.type != "cpu"
            or tensor.is_inference()
        ):
            return None
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found.append((name, tensor.shape, tensor.dtype, hashlib.sha256(data).hexdigest()))
    shared = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if ours:
        return (type(model), *shared, *found)
    config: Any = model.config
    return (type(model), config.to_json_string(use_diff=False), config._attn_implementation, *shared, *found)


def moved(front: Front, before: nn.Module, after: nn.Module) -> Front:
    """A copy of what was understood of `before`, of the equal model `after`."""
    kept = (front.captured.out_spec, front.captured.constants)  # nothing of the model's
    memo: dict[Any, Any] = {id(value): value for value in kept}
    for pairs in (
        zip(before.modules(), after.modules(), strict=True),
        zip(before.parameters(), after.parameters(), strict=True),
        zip(before.buffers(), after.buffers(), strict=True),
    ):
        memo |= {id(old): new for old, new in pairs}
    for graph_module in (front.captured.graph_module, front.canonical):
        assert isinstance(graph_module, GraphModule)
        copy.deepcopy(graph_module, memo)
        # Graphs note their nodes themselves, and records that name nodes look for them by identity.
        for old in [key for key in memo if isinstance(key, Node)]:
            memo[id(old)] = memo.pop(old)
    return copy.deepcopy(front, memo)


class Known:
    """What was understood, by model."""

    def __init__(self) -> None:
        self.fronts: dict[tuple[Any, ...], tuple[nn.Module, Front]] = {}
        self.on = True
        self._understood = pipeline._understood

    def begin(self) -> None:
        """Take the place of understanding."""
        pipeline._understood = self.understood

    def understood(
        self,
        model: nn.Module,
        foresee: Callable[[Front], object] | None,
        tracing: Callable[[], object] = nothing,
    ) -> Front:
        key = key_of(model) if self.on else None
        if key is None:
            return self._understood(model, foresee, tracing)
        if key in self.fronts:
            tracing()  # what is begun beside does not depend on what is known
            own, front = self.fronts[key]
            return moved(front, own, model)
        front = self._understood(model, foresee, tracing)
        if front.captured.opaques:  # they run the model's own modules, which a copy of them would not
            return front
        own = copy.deepcopy(model)
        with suppress(RuntimeError):  # of tensors without memory beside its nodes, which nothing copies
            self.fronts[key] = (own, moved(front, model, own))
        return front


known = Known()
