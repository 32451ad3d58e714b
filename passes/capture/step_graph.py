"""What a step of a module that runs as Python is, as a graph (passes/capture/python_step.py makes it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule


@dataclass(frozen=True)
class StepGraph:
    """A module's step.

    graph_module: placeholders: the module's inputs, its state, which is written to in place, and weights; output: the
        module's results
    weights: the model's own tensors; names: in the module
    """

    graph_module: GraphModule
    weights: tuple[Tensor, ...]
    names: tuple[str, ...]

    def run(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """Without compiling."""
        with torch.no_grad():
            return list(self.graph_module(*inputs, *state, *self.weights))
