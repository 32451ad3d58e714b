"""Devices, as far as a bound on decode speed and the model of generated kernels need them: one table.

Sources: the makers' data sheets (dense, SXM where there is such a form): memory, its bandwidth, the link, products in
half precision; multiprocessors and boost clocks are those of the architecture white papers. A link is what one
direction of all of a device's links together carries; PCIe is that of the form factor. Two figures are on no sheet, and
are assumptions here: the time that a collective takes at least (NCCL's latency tables for 8 ranks in one node), and the
share of its bandwidth that a copy reaches (measured on an H200: 4.3 of 4.8 TB/s; taken over for all HBM).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvcompile.errors import KVCompileError
from kvcompile.util.console import parse_bytes

_NVLINK_SECONDS, _PCIE_SECONDS = 8e-6, 20e-6  # of one collective of few bytes
_HBM_COPY, _GDDR_COPY = 4.3 / 4.8, 0.92  # of the bandwidth on the sheet


@dataclass(frozen=True)
class Machine:
    """One device.

    memory:    bytes
    bandwidth: of its memory, bytes a second
    link:      to the others of its group, bytes a second and direction
    seconds:   that a collective takes at least
    arch:      90 for sm_90
    multiprocessors: how many it has
    clock:     of a multiprocessor at boost, hertz
    products:  matrix products of half precision with sums in float32, operations a second (a product and a sum are two)
    copy:      of `bandwidth`, what a copy reaches
    """

    name: str
    memory: int
    bandwidth: float
    link: float
    seconds: float
    arch: int
    multiprocessors: int
    clock: float
    products: float
    copy: float

    @property
    def copied(self) -> float:
        """Bytes a second that a copy reads and writes."""
        return self.bandwidth * self.copy


def _gpu(
    name: str,
    gigabytes: int,
    bandwidth: float,
    link: float,
    cores: tuple[int, int, float, float],
    nvlink: bool = True,
) -> Machine:
    """cores: arch, multiprocessors, clock, products"""
    seconds, copy = (_NVLINK_SECONDS, _HBM_COPY) if nvlink else (_PCIE_SECONDS, _GDDR_COPY)
    return Machine(name, gigabytes * 10**9, bandwidth, link, seconds, *cores, copy)


MACHINES = {
    machine.name: machine
    for machine in (
        _gpu("a100", 80, 2.039e12, 300e9, (80, 108, 1.41e9, 312e12)),
        _gpu("h100", 80, 3.35e12, 450e9, (90, 132, 1.98e9, 989e12)),
        _gpu("h200", 141, 4.8e12, 450e9, (90, 132, 1.98e9, 989e12)),
        _gpu("b200", 180, 7.7e12, 900e9, (100, 148, 1.965e9, 2250e12)),
        _gpu("l4", 24, 300e9, 32e9, (89, 58, 2.04e9, 121e12), nvlink=False),
        _gpu("l40s", 48, 864e9, 32e9, (89, 142, 2.52e9, 362e12), nvlink=False),
        _gpu("rtx4090", 24, 1.008e12, 32e9, (89, 128, 2.52e9, 165e12), nvlink=False),
        _gpu("rtx5090", 32, 1.792e12, 64e9, (120, 170, 2.41e9, 209e12), nvlink=False),
    )
}


def machine(
    name: str,
    memory: str | int | None = None,
    bandwidth: str | int | None = None,
    link: str | int | None = None,
) -> Machine:
    """A device by its name, with what is known better; sizes as "24GB", those of a second as "3.35TB".

    Raises:
        KVCompileError: a name that is not in the table, or no size.
    """
    found = MACHINES.get(name.lower())
    if found is None:
        raise KVCompileError(
            f"device: expected one of {', '.join(MACHINES)}, got {name!r}; name the nearest, and give its memory, "
            "bandwidth and link beside it"
        )
    given = {"memory": memory, "bandwidth": bandwidth, "link": link}
    sizes: dict[str, Any] = {key: parse_bytes(value) for key, value in given.items() if value is not None}
    return replace(found, **sizes)


def called(name: str) -> Machine | None:
    """The device that a driver calls `name` ("NVIDIA GeForce RTX 4090" is rtx4090); None: it is not in the table."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    parts = {*words, *(first + second for first, second in pairwise(words))}
    return next((found for known, found in MACHINES.items() if known in parts), None)
