"""A decode step as one CUDA graph: all regions, all launches, replayed at once.

A step of a small batch is hundreds of launches of a few microseconds each, which Python cannot give in that time. A
graph of them is captured once and replayed: what differs from step to step is copied into tensors that stay in their
place, and the results are copied out of theirs.

    first step of a key     runs as it is, on the stream of captures (libraries make their workspaces)
    second                  is captured, which computes nothing, and replayed
    from then on            inputs are copied, the graph is replayed

So every step is computed exactly once: a cache is no thing to warm up on. The key is the class of shapes, the sizes of
what is copied, and the numbers among the inputs (the span of slots). Caches and weights are read and written where
they stand; when some stand elsewhere (`KVCache.version`), all graphs are forgotten.

Source: the CUDA programming guide, "CUDA Graphs"; `torch.cuda.graph`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcompile.errors import CompileError

log = logging.getLogger(__name__)

Outputs = tuple[Tensor, ...]
Step = Callable[[dict[str, Any]], Outputs]


class Recorder(Protocol):
    """What captures launches; `CudaRecorder`, or something that tells what would have been captured."""

    def warm(self, run: Callable[[], Outputs]) -> Outputs:
        """Run where captures are made."""

    def capture(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Note what `run` launches, without computing it; returns what replays it, and where its outputs stand."""


class CudaRecorder:
    """CUDA graphs of one device, captured on a stream of their own, with one pool of memory for all of them.

    They can share it because they are replayed one after the other, and what one has computed is copied out before
    the next.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, run: Callable[[], Outputs]) -> Outputs:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = run()
        current.wait_stream(self._stream)
        for output in outputs:
            output.record_stream(current)
        return outputs

    def capture(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = run()
        return graph.replay, outputs


@dataclass(frozen=True)
class _Captured:
    replay: Callable[[], None]
    outputs: Outputs


class StepGraphs:
    """The captured steps of one program."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._version: int | None = None
        self._inputs: dict[Hashable, dict[str, Any]] = {}  # of every key that came: where its inputs stand
        self._graphs: dict[Hashable, _Captured] = {}

    @property
    def count(self) -> int:
        """Graphs that are there now."""
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs, and give their memory back."""
        self._inputs, self._graphs = {}, {}

    def run(
        self, shapes: Hashable, step: Step, moving: dict[str, Any], fixed: dict[str, Tensor], version: int
    ) -> Outputs:
        """What `step(moving | fixed)` gives; new tensors, which later steps leave alone.

        Args:
            shapes: what else the step's code depends on.
            moving: inputs that differ from step to step: tensors are copied, numbers are part of the key.
            fixed: tensors that stay where they are while `version` is the same.
        """
        if version != self._version:
            self.clear()
            self._version = version
        key = (shapes, *((name, _kind(value)) for name, value in moving.items()))
        if key not in self._inputs:
            own = {name: x.clone() if isinstance(x, Tensor) else x for name, x in moving.items()}
            self._inputs[key] = own
            return self._recorder.warm(lambda: step({**own, **fixed}))
        own = self._inputs[key]
        for name, value in moving.items():
            if isinstance(value, Tensor):
                own[name].copy_(value, non_blocking=True)
        if key not in self._graphs:
            whole = {**own, **fixed}
            try:
                self._graphs[key] = _Captured(*self._recorder.capture(lambda: step(whole)))
            except RuntimeError as error:
                raise CompileError(
                    f"a decode step could not be captured as a CUDA graph: {error}. Nothing was computed; "
                    "compile: {mode: default} runs the step without"
                ) from error
            log.info("captured a CUDA graph of a step: %s, %d in all", shapes, len(self._graphs))
        captured = self._graphs[key]
        captured.replay()
        return tuple(output.clone() for output in captured.outputs)


def _kind(value: Any) -> Hashable:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
