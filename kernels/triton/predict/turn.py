"""How fast programs that share a multiprocessor make their turns.

A turn of a program needs a share of the memory's bandwidth, a share of its multiprocessor's clocks (the fullest pipe,
or issue), and time in which it needs neither: latency, and what instructions wait for each other. So the tiles that are
on a multiprocessor are customers of a closed queueing network with two servers and a delay, and their rate is what mean
value analysis gives (Reiser and Lavenberg 1980; Lazowska et al., Quantitative System Performance, 1984, chapter 6). A
kernel whose copies run ahead has as many customers a program as tiles that it holds: more buffers, less waiting.

Two bounds are kept besides: a program computes its tiles one after another, and no multiprocessor takes more from the
L2 cache than its port. The rate never exceeds that of any server: no launch is predicted below its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvcompile.kernels.triton.predict.model import Model


@dataclass(frozen=True)
class Turn:
    """What a turn of a program costs.

    bytes:   from memory; near: from the L2 cache, those among them
    busy:    seconds of the multiprocessor's fullest pipe, which is `pipe`
    alone:   seconds of a program that has the multiprocessor to itself, without its copies
    latency: seconds that a copy takes besides its share of the bandwidth
    ahead:   tiles that are on their way while one is computed
    """

    bytes: float
    near: float
    busy: float
    pipe: str
    alone: float
    latency: float
    ahead: int


@dataclass(frozen=True)
class Rate:
    """turns: of one program, a second; limit: "memory", "L2 cache", the name of a pipe, or "latency" """

    turns: float
    limit: str


@lru_cache(maxsize=65536)
def rate(turn: Turn, beside: int, active: int, model: Model) -> Rate:
    """Of each of the `beside` programs of a multiprocessor, where `active` programs run in all."""
    # Of the multiprocessor's part of the bandwidth.
    memory = turn.bytes * active / beside / model.machine.copied
    near = turn.near / (model.assumed.near * model.machine.clock)
    service = max(memory, near)
    customers = beside * (1 + turn.ahead)
    delay = max(turn.alone - turn.busy, 0.0) + turn.latency
    turns = _closed((service, turn.busy), delay, customers)
    turns = min(turns, beside / turn.alone if turn.alone else turns)
    bounds = {
        "memory": memory,
        "L2 cache": near if near > memory else 0.0,
        turn.pipe: turn.busy,
        "latency": max(turn.alone / beside, (delay + service + turn.busy) / customers),
    }
    return Rate(turns / beside, max(bounds, key=lambda name: bounds[name]))


def _closed(servers: tuple[float, ...], delay: float, customers: int) -> float:
    """Turns a second of `customers` that go around servers (seconds of a turn at each) and a delay, exactly."""
    waiting = [0.0] * len(servers)
    turns = 0.0
    for count in range(1, customers + 1):
        stays = [need * (1.0 + queue) for need, queue in zip(servers, waiting, strict=True)]
        turns = count / (delay + sum(stays))
        waiting = [turns * stay for stay in stays]
    return turns
