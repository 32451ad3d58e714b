"""Reads what PTX says of how programs hand over to each other: the order of stores, barriers, an atomic and loads.

A program that counts itself has stored something that the last one loads (`attend/work_list.py`). By PTX's memory model
it is there if every store is before a barrier of the program, that before an atomic which acquires and releases for the
whole GPU, and that before a barrier behind which the loads are, copies to shared memory among them; and if no load goes
by a path that is not coherent.
"""

from __future__ import annotations

import re

_EVENT = re.compile(
    r"\b(?:(st\.global)|((?:ld|cp\.async\.c[ag]\.shared)\.global(?:\.[\w:]+)*)|(bar(?:rier)?\.(?:cta\.)?sync)|(atom(?:\.\w+)+))"
)


def handovers(ptx: str) -> tuple[str, ...]:
    """What is wrong with each atomic of a kernel, in the order of the text; "": nothing."""
    events = [found for line in ptx.splitlines() if (found := _event(line))]
    return tuple(_problem(events, place) for place, event in enumerate(events) if event.startswith("atom"))


def _event(line: str) -> str:
    found = _EVENT.search(line.partition("//")[0])
    if not found:
        return ""
    store, load, barrier, atomic = found.groups()
    return "store" if store else "barrier" if barrier else load or atomic


def _problem(events: list[str], place: int) -> str:
    before, after = events[:place], events[place + 1 :]
    if not {"acq_rel", "gpu"} <= set(events[place].split(".")):
        return f"{events[place]} does not acquire and release for the GPU"
    if "store" not in before or "barrier" not in before or _last(before, "store") > _last(before, "barrier"):
        return "no barrier between the stores and the atomic"
    loads = [at for at, event in enumerate(after) if event.startswith(("ld", "cp"))]
    if not loads or "barrier" not in after or after.index("barrier") > loads[0]:
        return "no barrier between the atomic and the loads"
    if any(event.endswith(".nc") or ".nc." in event for event in after):
        return "a load that is not coherent"
    return ""


def _last(events: list[str], wanted: str) -> int:
    return max(at for at, event in enumerate(events) if event == wanted)
