"""How many threads pay: a parallel loop waits for its slowest thread, on a core that another program may have.

What understands and verifies a model runs thousands of small operators. Where all cores are ours, threads halve the
time of the larger ones; where one is busy elsewhere, every loop of two threads waits for the scheduler: on two cores
beside two other programs, `optimize` of a model of 135 million weights took 135 s with two threads and 11 s with one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

log = logging.getLogger(__name__)
_WIDTH = 768  # of the sample: a small model's linear layer
_SHORT = 32  # tokens of most texts that a model is looked at with
_ROWS = 40 * _SHORT  # of a sample in all, in several loops; a busy core is met within a few
_RUNS = 3
_PAYS = 0.9  # of the time: what more threads must save
_most: ContextVar[int | None] = ContextVar("most threads", default=None)  # of whoever is outside of all


@contextmanager
def threads_that_pay(device: torch.device, tokens: int = _SHORT) -> Iterator[None]:
    """Let operators on CPUs, over texts of `tokens`, run in as many threads as make them faster just now.

    What is inside of another is measured for itself, with the threads of whoever is outside of all.
    """
    before = torch.get_num_threads()
    most = _most.get() or before
    if most == 1 or device.type != "cpu":
        yield
        return
    outside = _most.set(most)
    try:
        fewer = _measured(most, tokens)
        torch.set_num_threads(fewer)
        if fewer < most:
            log.info(
                "%d of %d threads over %d tokens: more make nothing faster just now", fewer, most, tokens
            )
        yield
    finally:
        _most.reset(outside)
        torch.set_num_threads(before)


def _measured(most: int, tokens: int) -> int:
    """The number of threads, at most `most`, with which a sample of operators takes the least time."""
    best, least = 1, min(_seconds(1, tokens, math.inf) for _ in range(_RUNS))
    counts = [1 << power for power in range(1, most.bit_length()) if 1 << power < most]
    for count in [*counts, most]:
        taken = min(_seconds(count, tokens, least) for _ in range(_RUNS))
        if taken > least * _PAYS:
            break
        best, least = count, taken
    return best


def _seconds(threads: int, tokens: int, most: float) -> float:
    """What the sample takes, or infinity once it takes more than `most`."""
    torch.set_num_threads(threads)
    x, weight = torch.zeros(tokens, _WIDTH), torch.zeros(_WIDTH, _WIDTH)
    started = time.perf_counter()
    for _ in range(max(4, _ROWS // tokens)):
        torch.nn.functional.silu(x @ weight)
        if time.perf_counter() - started > most:
            return math.inf
    return time.perf_counter() - started
