"""A graph beside its model: it is confirmed where it gives what the model's own forward gives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kvcompile.errors import CaptureError
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.capture.first_line import first_line
from kvcompile.passes.capture.inputs import CapturedInputs, device_of, example, wrap
from kvcompile.passes.probe.steps import Steps
from kvcompile.passes.recurrent.state import attributes_restored

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """A graph, and the sizes [sequences, tokens] at which it must give what the model gives."""

    captured: Captured
    calls: Calls
    sizes: Sequence[tuple[int, int]]

    def confirm(self, traced_under: str | None = None) -> None:
        """Compare at these sizes.

        traced_under: the attention implementation, where the model has another one now; None: it is the same

        Raises:
            CaptureError: the graph gives something else.
        """
        for batch, tokens in self.sizes:
            if self.captured.max_seq_len is not None and tokens > self.captured.max_seq_len:
                continue
            inputs = self.calls.inputs(batch, tokens)
            output = None if traced_under else self.calls.known.get((batch, tokens))
            if output is None:
                with attributes_restored(self.calls.model):
                    try:
                        output = self.calls(inputs)
                    except Exception as error:  # nothing to compare with: the model refuses this size itself
                        log.debug("%d x %d tokens: %s", batch, tokens, error)
                        continue
            problem = _differs(self.captured, inputs, output)
            if problem and traced_under:
                raise CaptureError(
                    f"the model computes something else under the attention implementation that it has ({problem}): "
                    f"load it with attn_implementation={traced_under!r} if that is what it shall compute"
                )
            if problem:
                raise CaptureError(
                    f"the graph does not compute what the model computes for {batch} x {tokens} tokens: {problem}."
                    " Remove Python control flow that depends on the exact batch or sequence length"
                )


class Calls:
    """The model's own forward, with the inputs that its graph has."""

    def __init__(self, model: nn.Module, inputs: CapturedInputs, first: str, fixed: dict[str, Any]):
        self.model, self.names = model, inputs
        self.device = device_of(model)
        self.wrapper = wrap(model, inputs, first, fixed)
        self.known: dict[tuple[int, int], Any] = {}  # results by sequences and tokens

    def inputs(self, batch: int, tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
        return example(self.names, batch, tokens, min(2, tokens), self.device, seed)

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        with torch.no_grad():
            return self.wrapper(*inputs)


def _differs(captured: Captured, inputs: tuple[Tensor, ...], output: Any) -> str:
    """How the graph's logits differ from the model's; empty where they are the same to rounding."""
    leaves = pytree.tree_leaves(output)
    constant = {index for index, _ in captured.constants}
    wanted = [leaf for index, leaf in enumerate(leaves) if index not in constant][captured.logits_index]
    if captured.last is not None:
        inputs = (*inputs, torch.tensor([inputs[0].shape[1] - 1], device=inputs[0].device))
    try:
        with torch.no_grad():
            found = Steps(captured.graph_module).run(*inputs)[captured.logits_index]
    except Exception as error:  # whatever an operator raises for a shape that it cannot take
        return first_line(error)
    if captured.last is not None and captured.last.flat:
        found = found[:, 0]
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"logits {found.dtype}{list(found.shape)}, the model's are {wanted.dtype}{list(wanted.shape)}"
    one, other = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (found, wanted))
    size = other.square().mean().sqrt().clamp(min=1e-30)
    distance = float((one - other).square().mean().sqrt() / size)
    allowed = 1e-4 if wanted.dtype in (torch.float32, torch.float64) else 3e-2
    return "" if distance <= allowed else f"the logits differ by {distance:.1e} of their size"
