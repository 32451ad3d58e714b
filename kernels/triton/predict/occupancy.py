"""How many programs of a kernel a multiprocessor holds at the same time, and what limits them.

A warp's registers come from the quarter of its scheduler; shared memory and warps are the multiprocessor's.
Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.kernels.triton.predict import assumptions as a


@dataclass(frozen=True)
class Room:
    """Of one multiprocessor. warps, programs: at most; shared: bytes"""

    warps: int
    programs: int
    shared: int


ROOM = {
    80: Room(64, 32, 164 * 1024),
    86: Room(48, 16, 100 * 1024),
    89: Room(48, 24, 100 * 1024),
    90: Room(64, 32, 228 * 1024),
    100: Room(64, 32, 228 * 1024),
    120: Room(48, 24, 100 * 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """programs: of a multiprocessor, 0: one does not fit; by: "registers", "shared memory", "warps" or "programs" """

    programs: int
    by: str


def occupancy(registers: int, shared: int, num_warps: int, arch: int) -> Occupancy:
    """registers: of a thread; shared: bytes of a program"""
    room = ROOM[arch]
    of_warp = _up(max(registers, 1) * a.WARP, a.REGISTER_UNIT)
    warps = a.SCHEDULERS * (a.REGISTERS // a.SCHEDULERS // of_warp)
    own = _up(shared, a.SHARED_UNIT) + a.SHARED_SYSTEM
    limits = {
        "registers": warps // num_warps,
        "shared memory": room.shared // own,
        "warps": room.warps // num_warps,
        "programs": room.programs,
    }
    by = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[by], by)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
