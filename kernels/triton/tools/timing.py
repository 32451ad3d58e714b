"""Times of GPU work: CUDA graphs, replayed in turns, medians. On a CPU the same with a plain clock, for dry runs.

What is timed runs over several copies of its cache, so that the second turn does not read what the first left in the
L2 cache; a graph holds one call for each copy, so no launch waits for the host. What a graph takes to begin is no time
of a call: it holds several, and the device has something to do until it is there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]
_WARM = 3
_CALLS = 8  # of a graph, at least
_BUSY = 100_000  # cycles that the device has to itself before a graph: the host needs some microseconds to ask for it


class Timed:
    """Calls that are measured together: one for each copy of the data."""

    def __init__(self, calls: Sequence[Call], device: torch.device):
        self.calls, self.device = calls, device
        self.turns = max(1, -(-_CALLS // len(calls))) if device.type == "cuda" else 1
        self.graph: torch.cuda.CUDAGraph | None = None
        self.note = ""
        if device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                for call in self.calls:
                    call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(self.turns):
                    for call in self.calls:
                        call()
        except RuntimeError as error:  # some peers allocate or synchronise
            torch.cuda.synchronize()
            self.note = f"without a CUDA graph: {str(error).splitlines()[0]}"
            return
        self.graph = graph

    def once(self) -> float:
        """Microseconds of a call: the mean over the copies."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            for call in self.calls:
                call()
            return (time.perf_counter() - start) * 1e6 / len(self.calls)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_BUSY)
        begin.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            for _ in range(self.turns):
                for call in self.calls:
                    call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / (len(self.calls) * self.turns)


def medians(timed: Mapping[str, Timed], rounds: int) -> dict[str, float]:
    """Median microseconds of each, measured in turns."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(rounds + 1):
        for name, one in timed.items():
            value = one.once()
            if turn:  # the first warms up
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def copy_bandwidth(device: torch.device, size: int, rounds: int) -> float:
    """Bytes a second that a copy of `size` bytes reads and writes; the best of the rounds, and of two ways to copy.

    A copy of the driver is no measure by itself: on an H200 it moved 2.7 TB/s as a node of a CUDA graph, where kernels
    read 4.6.
    """
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    ways = [lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target)]
    timed = [Timed([way], device) for way in ways]
    return 2 * size / (min(one.once() for one in timed for _ in range(rounds + 1)) * 1e-6)
