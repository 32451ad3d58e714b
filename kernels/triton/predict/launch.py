"""One launch: seconds, what they go to, and what of the memory's bandwidth that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcompile.errors import KernelError
from kvcompile.kernels.triton.predict import assumptions as a
from kvcompile.kernels.triton.predict.assumptions import Assumed
from kvcompile.kernels.triton.predict.facts import Facts, assembled
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.occupancy import occupancy
from kvcompile.kernels.triton.predict.pipes import clocks
from kvcompile.kernels.triton.predict.recorded import Made, Shape
from kvcompile.kernels.triton.predict.skew import spent
from kvcompile.kernels.triton.predict.turn import Turn
from kvcompile.kernels.triton.predict.work import Work, work
from kvcompile.kernels.triton.tools.assemble import Assembled


@dataclass(frozen=True)
class Predicted:
    """A launch, as predicted.

    seconds:  from the end of the launch before it to its own end
    bytes:    that it moves; share: of a copy's bandwidth
    programs: of its grid; places: programs that a multiprocessor holds; by: what limits these
    waves:    programs over places
    on:       what the seconds go to -> how many: "launch", "start", "tail", "memory", "L2 cache", "latency", or a pipe
    """

    role: str
    key: str
    seconds: float
    bytes: float
    share: float
    programs: int
    places: int
    by: str
    waves: float
    on: dict[str, float]

    @property
    def limit(self) -> str:
        """What most of the time goes to."""
        return max(self.on, key=lambda name: self.on[name])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "limit": self.limit}


def predicted(made: Sequence[Made], shape: Shape, facts: Facts, model: Model) -> tuple[Predicted, ...]:
    """The launches of a call.

    Raises:
        KernelError: a kernel does not assemble, or a program of it does not fit the device.
    """
    return tuple(one_launch(one, assembled(facts, one.request), work(one, shape), model) for one in made)


def one_launch(made: Made, fact: Assembled, own: Work, model: Model) -> Predicted:
    """A launch from what its machine code says and what its programs do."""
    warps, machine = made.request.num_warps, model.machine
    room = occupancy(fact.registers, fact.shared, warps, machine.arch)
    if not room.programs:
        raise KernelError(
            f"{made.spec.role} {made.spec.key}: a program takes {fact.registers} registers of {warps * a.WARP} threads "
            f"and {fact.shared:,} bytes of shared memory, which {machine.name} does not have ({room.by})"
        )
    each = turn_of(fact, own, made, model)
    start, end = _around(fact, own, warps, model)
    found = spent(own.programs, each, start, end, room.programs, model)
    seconds = model.assumed.launch + found.seconds
    moved = sum(own.programs) * own.bytes
    return Predicted(
        made.spec.role,
        made.spec.key,
        seconds,
        moved,
        moved / seconds / machine.copied,
        len(own.programs),
        room.programs,
        room.by,
        len(own.programs) / (room.programs * machine.multiprocessors),
        {"launch": model.assumed.launch, **found.on},
    )


def turn_of(fact: Assembled, own: Work, made: Made, model: Model) -> Turn:
    """What a turn of its main loop costs; of a kernel without a loop, all of it."""
    warps, spec, assumed = made.request.num_warps, made.spec, model.assumed
    clock, lines = model.machine.clock, fact.pipeline
    operations = 2.0 * spec.block_m * spec.block_n * (spec.head_dim + spec.v_head_dim)
    takes = clocks(fact.opcodes, warps, model, operations)
    pipe = max(takes, key=lambda name: takes[name])
    part = own.part * (own.tiles if fact.instructions is not None else 1)
    busy = takes[pipe] * part / clock
    alone = (sum(fact.opcodes.values()) * _pace(warps, assumed) + fact.barriers * assumed.barrier) * part
    miss = assumed.miss * assumed.busy
    waits = 0.0
    if lines is None:
        count = fact.waits if own.waits is None else own.waits
        waits = count * (assumed.hit if own.written else assumed.miss)
    elif lines.sync_loads:
        # The first goes to memory; what stands beside it came with it.
        waits = miss + (lines.sync_loads - 1) * assumed.hit
    return Turn(
        own.bytes,
        own.near,
        busy,
        pipe,
        max(alone / clock, busy) + waits,
        miss if lines is not None else 0.0,
        ahead(fact),
    )


def ahead(fact: Assembled) -> int:
    """Tiles that are on their way while one is computed: none where a turn waits for all copies."""
    lines = fact.pipeline
    return lines.buffers - 1 if lines is not None and lines.wait and lines.buffers > 1 else 0


def _around(fact: Assembled, own: Work, warps: int, model: Model) -> tuple[float, float]:
    """Seconds before a program's first turn, and after its last."""
    assumed = model.assumed
    half = fact.outside / 2 if fact.instructions is not None else 0.0
    computing = half * _pace(warps, assumed) / model.machine.clock
    return assumed.program + own.before * assumed.miss + computing, computing


def _pace(warps: int, assumed: Assumed) -> float:
    """Clocks from one instruction of a program's warps to the next, where it has the multiprocessor to itself."""
    return max(assumed.alone, math.ceil(warps / a.SCHEDULERS))
