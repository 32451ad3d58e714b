"""The original's output around the flat outputs of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Outputs:
    """
    spec:      of what the model returned
    constants: its leaves that are no tensors, by leaf index
    flat:      which of the outputs is [B, V] in the original, without the dimension of tokens
    """

    spec: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...] = ()
    flat: int | None = None

    def __call__(self, outputs: Sequence[Any]) -> Any:
        leaves = list(outputs)
        if self.flat is not None:
            leaves[self.flat] = leaves[self.flat][:, -1]
        for index, constant in self.constants:
            leaves.insert(index, constant)
        return pytree.tree_unflatten(leaves, self.spec)
