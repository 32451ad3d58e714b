"""Equal graphs are exported to ONNX once in a session of tests.

PyTorch's export and its translation take most of what an artifact of a tiny model takes, and many tests write the same
one anew: to replace it, to damage it, to run it elsewhere. Of what was translated first, the others get a copy; its
weights are moved to files, its sizes named and its files checked each time. Tests that patch anything translate for
themselves, but those that patch what comes after (`AFTER`).
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.fx import GraphModule

from kvcompile.targets.functional import Functional
from kvcompile.targets.onnx import graph

# Files whose patches are of what loads a model or writes files, and none of the translation.
AFTER = ("docs/test_docs", "targets/test_artifacts")


def key_of(function: Functional, one: bool, opset: int) -> tuple[Any, ...]:
    """All that a translation depends on: the code of the graphs, every tensor in them, and the arguments."""
    tensors = []
    for name, tensor in (*function.named_parameters(), *function.named_buffers()):
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        tensors.append((name, tensor.shape, tensor.dtype, hashlib.sha256(data).hexdigest()))
    code = [(name, m.code) for name, m in function.named_modules() if isinstance(m, GraphModule)]
    code += [(str(number), m.code) for number, m in enumerate(function.regions.modules)]
    arguments = [
        (a, function.cache_dtype(a.name) if a.role == "cache" else None) for a in function.arguments(one)
    ]
    return (
        *(one, opset, function.in_place, function.plan.digest(), repr(function.dialect)),
        *(function.logits_index, function.shape.span),
        *(tuple(found) for found in (code, tensors, arguments)),
    )


class Exported:
    """What was translated, by all that it depends on."""

    def __init__(self) -> None:
        self.models: dict[tuple[Any, ...], Any] = {}
        self.on = True
        self._model = graph._model

    def begin(self) -> None:
        """Take the place of translating."""
        graph._model = self.model

    def model(self, function: Functional, one: bool, opset: int) -> Any:
        if not self.on:
            return self._model(function, one, opset)
        key = key_of(function, one, opset)
        if key not in self.models:
            self.models[key] = self._model(function, one, opset)
        return self.models[key].clone()


exported = Exported()
