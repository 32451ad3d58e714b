"""Devices, as far as a bound on decode speed needs them: memory, bandwidth, and the link between two of them.

Sources: the makers' data sheets (dense, SXM where there is such a form). A link is what one direction of all of a
device's links together carries; PCIe is that of the form factor. The time that a collective takes at least is not on
any sheet: it is what NCCL's latency tables give for 8 ranks in one node, and is an assumption here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvcompile.errors import KVCompileError
from kvcompile.util.console import parse_bytes

_NVLINK_SECONDS, _PCIE_SECONDS = 8e-6, 20e-6  # of one collective of few bytes


@dataclass(frozen=True)
class Machine:
    """One device.

    memory:    bytes
    bandwidth: of its memory, bytes a second
    link:      to the others of its group, bytes a second and direction
    seconds:   that a collective takes at least
    """

    name: str
    memory: int
    bandwidth: float
    link: float
    seconds: float


def _gpu(name: str, gigabytes: int, bandwidth: float, link: float, nvlink: bool = True) -> Machine:
    return Machine(name, gigabytes * 10**9, bandwidth, link, _NVLINK_SECONDS if nvlink else _PCIE_SECONDS)


MACHINES = {
    machine.name: machine
    for machine in (
        _gpu("a100", 80, 2.039e12, 300e9),
        _gpu("h100", 80, 3.35e12, 450e9),
        _gpu("h200", 141, 4.8e12, 450e9),
        _gpu("b200", 180, 7.7e12, 900e9),
        _gpu("l4", 24, 300e9, 32e9, nvlink=False),
        _gpu("l40s", 48, 864e9, 32e9, nvlink=False),
        _gpu("rtx4090", 24, 1.008e12, 32e9, nvlink=False),
        _gpu("rtx5090", 32, 1.792e12, 64e9, nvlink=False),
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
