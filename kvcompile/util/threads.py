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

import torch

log = logging.getLogger(__name__)
_WIDTH, _TOKENS = 768, 32  # of the sample: a small model's linear layer, on a short text
_LOOPS = 40  # of a run; a busy core is met within a few
_RUNS = 3
_PAYS = 0.9  # of the time: what more threads must save


@contextmanager
def threads_that_pay(device: torch.device) -> Iterator[None]:
    """Let operators on CPUs run in as many of this thread's threads as make them faster just now."""
    most = torch.get_num_threads()
    if most == 1 or device.type != "cpu":
        yield
        return
    try:
        fewer = _measured(most)
        torch.set_num_threads(fewer)
        if fewer < most:
            log.info(
                "%d of %d threads: more make nothing faster just now, others have the cores", fewer, most
            )
        yield
    finally:
        torch.set_num_threads(most)


def _measured(most: int) -> int:
    """The number of threads, at most `most`, with which a sample of small operators takes the least time."""
    best, least = 1, min(_seconds(1, math.inf) for _ in range(_RUNS))
    counts = [1 << power for power in range(1, most.bit_length()) if 1 << power < most]
    for count in [*counts, most]:
        taken = min(_seconds(count, least) for _ in range(_RUNS))
        if taken > least * _PAYS:
            break
        best, least = count, taken
    return best


def _seconds(threads: int, most: float) -> float:
    """What the sample takes, or infinity once it takes more than `most`."""
    torch.set_num_threads(threads)
    x, weight = torch.zeros(_TOKENS, _WIDTH), torch.zeros(_WIDTH, _WIDTH)
    started = time.perf_counter()
    for _ in range(_LOOPS):
        torch.nn.functional.silu(x @ weight)
        if time.perf_counter() - started > most:
            return math.inf
    return time.perf_counter() - started
