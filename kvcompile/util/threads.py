"""How many threads pay: a parallel loop waits for its slowest thread, on a core that another program may have.

What understands and verifies a model runs thousands of small operators. Where all cores are ours, threads halve the
time of the larger ones; where one is busy elsewhere, every loop of two threads waits for the scheduler: on two cores
beside two other programs, `optimize` of a model of 135 million weights took 135 s with two threads and 11 s with one.
Compilers of our own that run beside it are such programs, and known without a measurement.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from statistics import median
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)
SHORT = 32  # tokens of most texts that a model is looked at with
_WIDEST = 8192  # channels of a sample's layer at most
_SAMPLE = 0.02  # seconds of a sample, about; a busy core is met within a few loops
_LOOPS = (4, 64)  # of a sample, at least and at most
_RUNS = 3
_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes that PyTorch multiplies
_PAYS = 0.9  # of the time: what more threads must save
_FRESH = 10.0  # seconds for which a measurement is believed: understanding and proof of a model share one
_most: ContextVar[int | None] = ContextVar("most threads", default=None)  # of whoever is outside of all
# Of whoever is inside of all.
_chosen: ContextVar[_Choice | None] = ContextVar("chosen threads", default=None)
# Of each core that programs have which this process started: when they began, by an event that is set at their end.
_beside: dict[Event, float] = {}
_MOMENT = 0.05  # seconds


def take_core() -> Event:
    """Say that programs which this process started have a core, until the event is set that is given back."""
    ended = Event()
    _beside[ended] = time.monotonic()
    return ended


def cores_taken() -> int:
    """How many cores such programs have; what ends within a moment of its begin has found all that it would make."""
    for ended, began in tuple(_beside.items()):
        if ended.wait(max(0.0, began + _MOMENT - time.monotonic())):
            _beside.pop(ended, None)
    return len(_beside)


@contextmanager
def threads_that_pay(model: nn.Module, tokens: int = SHORT) -> Iterator[None]:
    """Let a model on a CPU run over texts of `tokens` in as many threads as make it faster just now.

    What is inside of another is measured for itself, with the threads of whoever is outside of all, less those whose
    cores compilers of this process have. A sample that was taken a few seconds ago is not taken again.
    """
    before = torch.get_num_threads()
    most = _most.get() or before
    sample = None if most == 1 else Sample.of(model, tokens)
    if sample is None:
        yield
        return
    outside = _most.set(most)
    choice = _Choice(sample, most)
    around = _chosen.set(choice)
    try:
        choice.renew()
        yield
    finally:
        _chosen.reset(around)
        _most.reset(outside)
        torch.set_num_threads(before)


def renew_threads() -> None:
    """Let what goes on have the cores that compilers have given back by now, or leave them those that they took."""
    choice = _chosen.get()
    if choice is not None:
        choice.renew()


class _Choice:
    """How many threads pay for a sample, by the cores that were free when it was last asked."""

    def __init__(self, sample: Sample, most: int):
        self.sample, self.most, self.free = sample, most, 0

    def renew(self) -> None:
        free = max(1, self.most - cores_taken())
        if free == self.free:
            return
        self.free, tokens = free, len(self.sample.x)
        fewer = 1 if free == 1 else _lately(self.sample, free)
        torch.set_num_threads(fewer)
        if fewer < self.most:
            log.info(
                "%d of %d threads over %d tokens: more make nothing faster just now", fewer, self.most, tokens
            )


@dataclass(frozen=True)
class Sample:
    """A layer of a model's usual size, and what a text of some tokens gives it."""

    x: Tensor
    weight: Tensor

    @classmethod
    def of(cls, model: nn.Module, tokens: int) -> Sample | None:
        """None: the model has no weights on a CPU that its operators could be many for."""
        weights = [w for w in model.parameters() if w.dim() == 2 and w.dtype.is_floating_point]
        if not weights or weights[0].device.type != "cpu":
            return None
        width = min(math.isqrt(int(median(w.numel() for w in weights))), _WIDEST)
        dtype = weights[len(weights) // 2].dtype
        if dtype not in _PRODUCTS:  # what codes are decoded to
            dtype = torch.float32
        return cls(torch.zeros(tokens, width, dtype=dtype), torch.zeros(width, width, dtype=dtype))

    def seconds(self, threads: int, loops: int, most: float = math.inf) -> float:
        """What it takes, or infinity once it takes more than `most`."""
        torch.set_num_threads(threads)
        started = time.perf_counter()
        for _ in range(loops):
            torch.nn.functional.silu(self.x @ self.weight)
            if time.perf_counter() - started > most:
                return math.inf
        return time.perf_counter() - started


_measurements: dict[
    tuple[Any, ...], tuple[float, int]
] = {}  # by sample and most threads: when, and what was found


def _lately(sample: Sample, most: int) -> int:
    """What `_measured` gives, or gave a moment ago for such a sample."""
    key = (sample.x.shape, sample.x.dtype, sample.weight.shape, most)
    when, found = _measurements.get(key, (-math.inf, 1))
    if time.monotonic() - when > _FRESH:
        found = _measured(sample, most)
        _measurements[key] = (time.monotonic(), found)
    return found


def _measured(sample: Sample, most: int) -> int:
    """The number of threads, at most `most`, with which a sample takes the least time."""
    sample.seconds(1, 2)  # whatever the first call makes
    loops = min(max(_LOOPS[0], round(2 * _SAMPLE / sample.seconds(1, 2))), _LOOPS[1])
    best, least = 1, min(sample.seconds(1, loops) for _ in range(_RUNS))
    counts = [1 << power for power in range(1, most.bit_length()) if 1 << power < most]
    for count in [*counts, most]:
        taken = min(sample.seconds(count, loops, least) for _ in range(_RUNS))
        if taken > least * _PAYS:
            break
        best, least = count, taken
    return best
