"""Measures how kernels are best cut up on the GPU at hand, and writes the table that `config.py` looks them up in.

For every subject (a site, and the batches and lengths that it shall serve) each candidate is timed as CUDA graphs over
caches that no L2 cache holds, and compared with the table's present choice in the same rounds. The best has the
smallest geometric mean of its times over the points; it must win by more than `_GAIN`, so that noise changes no table.
On a GPU that the model of machines knows, what it calls hopeless is left out (`predict/prior.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import KernelError
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.config import (
    Case,
    Config,
    case_of,
    config,
    fitted,
    table_of,
    using,
)
from kvcompile.kernels.triton.device import Device, device_of
from kvcompile.kernels.triton.host.attention import cached_attention
from kvcompile.kernels.triton.host.decoded_once import read_in_slots
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.prior import Ranked, ranked
from kvcompile.kernels.triton.predict.recorded import Shape
from kvcompile.kernels.triton.spec import Role
from kvcompile.kernels.triton.tools.synthetic_cache import Sample, sample
from kvcompile.kernels.triton.tools.timing import Timed, medians
from kvcompile.util.cache_dir import make_cache_dir, write_atomically
from kvcompile.util.machines import Machine, called

Progress = Callable[[str, int, int], None]
ROOM = 256 << 20  # bytes of caches that are read before one is read again
_GAIN = 0.02
_ABOUT = "Measured by kvcompile tune; it comes before the shipped table. Delete it to go back."
_SHAPES: dict[Role, dict[str, tuple[Any, ...]]] = {
    "decode": {
        "block_n": (16, 32, 64, 128),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (2, 3, 4, 5, 6),
        "waves": (1.0, 2.0, 3.0, 4.0, 8.0),
    },
    "prefill": {
        "block_m": (32, 64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 5),
    },
}
ROLES = tuple(_SHAPES)


@dataclass(frozen=True)
class Point:
    """A batch of sequences of `context` tokens, `tokens` of them new."""

    batch: int
    context: int
    tokens: int = 1


@dataclass(frozen=True)
class Subject:
    """What is tuned together. name: for people; heads, dims: of queries and keys, of keys and values"""

    name: str
    role: Role
    site: SiteSpec
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    points: tuple[Point, ...]

    @property
    def case(self) -> Case:
        return case_of(self.role, self.site, *self.heads, *self.dims, self.dtype)


@dataclass(frozen=True)
class Tuned:
    """us: at each point, with `best`; before: with what the tables say now, in the same rounds

    tried, left_out: candidates that were measured, and that the model called hopeless
    """

    subject: Subject
    best: Config
    us: tuple[float, ...]
    before: tuple[float, ...]
    tried: int = 0
    left_out: int = 0

    @property
    def gain(self) -> float:
        """How many times as fast, over the points."""
        return _mean(self.before) / _mean(self.us)

    def entry(self, device: Device) -> dict[str, Any]:
        """The table's entry: for exactly this case, on this device."""
        made_by = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton"))
        shapes = {name: getattr(self.best, name) for name in _SHAPES[self.subject.role]}
        where = f"{device.name}, {made_by}, {datetime.now(UTC):%Y-%m-%d}"
        return {
            "when": {"device": device.name, **vars(self.subject.case)},
            "use": shapes,
            "source": f"measured on {where}: {self.gain:.2f} times as fast as before ({self.subject.name})",
        }


def tune(
    subjects: Sequence[Subject],
    device: torch.device,
    rounds: int = 10,
    progress: Progress | None = None,
    hopeless: bool = False,
) -> list[Tuned]:
    """Measure the candidates of all subjects; hopeless: those as well that the model of the GPU calls so.

    Raises:
        KernelError: no GPU, caches that do not fit it, or a subject of which no candidate runs.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise KernelError(
            "kvcompile tune measures on an NVIDIA GPU, and there is none here: run it where the model will run (until "
            "then the shipped table is used)"
        )
    tell = progress or (lambda stage, done, total: None)
    return [_tuned(subject, device, rounds, ROOM, tell, hopeless) for subject in subjects]


def write(tuned: Sequence[Tuned], device: Device, path: Path | None = None) -> Path:
    """The table with these entries, before those of other cases that it had.

    Raises:
        KernelError: it cannot be written, or what is there is no table.
    """
    target = path or table_of(device)
    try:
        old = json.loads(target.read_text("utf-8"))["entries"] if target.exists() else []
        entries = [one.entry(device) for one in tuned]
        known = [entry["when"] for entry in entries]
        kept = [entry for entry in old if entry["when"] not in known]
        if path is None:
            make_cache_dir()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, json.dumps({"about": _ABOUT, "entries": entries + kept}, indent=2) + "\n")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise KernelError(f"{target}: the table of configurations cannot be written: {error}") from error
    return target


def candidates(subject: Subject, device: Device) -> list[Config]:
    """What is tried: every combination that fits the site and the device, once."""
    shapes = _SHAPES[subject.role]
    found: dict[Config, None] = {}
    for values in product(*shapes.values()):
        asked = Config(**dict(zip(shapes, values, strict=True)))
        found.setdefault(fitted(asked, subject.case, subject.site, device))
    return list(found)


def ranking(subject: Subject, machine: Machine, progress: Progress | None = None) -> Ranked:
    """What is predicted of all candidates of a subject, and of what the tables say now."""
    own = Device(machine.name, machine.arch, machine.multiprocessors)
    site = replace(subject.site, share="middle", kernels="triton")
    shapes = [
        Shape(site, subject.heads, subject.dims, subject.dtype, (at.context,) * at.batch, at.tokens)
        for at in subject.points
    ]
    now = replace(config(subject.case, subject.site, own), source="")
    tried = dict.fromkeys((now, *candidates(subject, own)))
    return ranked(subject.role, tried, shapes, Model(machine), progress)


def run_once(subject: Subject, device: torch.device) -> None:
    """Call what is tried of a subject at each of its points, measuring nothing: so that it is compiled."""
    tried = _hopeful(subject, device_of(device), lambda *told: None)
    for point in subject.points:
        one = _sample(subject, point, device, 0)
        for candidate in tried:
            with suppress(*too_large()):  # it is left out when it is measured, too
                call_of(subject.role, candidate, one, 0)()


def _hopeful(subject: Subject, device: Device, tell: Progress) -> list[Config]:
    """The candidates to try; on a GPU that the table of machines does not have, and where none is said to run, all."""
    tried = candidates(subject, device)
    known = called(device.name)
    if known is None:
        return tried
    machine = replace(known, arch=device.arch, multiprocessors=device.multiprocessors)
    found = [one for one in ranking(subject, machine, tell).hopeful() if one in tried]
    return found or tried


def _tuned(
    subject: Subject,
    device: torch.device,
    rounds: int,
    room: int,
    tell: Progress,
    hopeless: bool = False,
) -> Tuned:
    own = device_of(device)
    now = config(subject.case, subject.site, own)
    possible = candidates(subject, own)
    tried = possible if hopeless else _hopeful(subject, own, tell)
    counts = (len(tried), len(possible) - len(tried))
    times: dict[Config, list[tuple[float, float]]] = {candidate: [] for candidate in tried}
    failed: Exception | None = None
    for number, point in enumerate(subject.points):
        one = _sample(subject, point, device, room)
        for candidate in list(times):
            done = number * len(tried) + tried.index(candidate)
            tell(f"{subject.name}, {subject.role}", done, len(tried) * len(subject.points))
            try:
                times[candidate].append(_times(subject.role, (now, candidate), one, rounds))
            except too_large() as error:
                failed = error
                del times[candidate]
    if not times:
        raise KernelError(
            f"{subject.name}: none of {len(tried)} configurations runs on {own.name}"
        ) from failed
    best = min(times, key=lambda candidate: _mean([new / old for old, new in times[candidate]]))
    before, after = (tuple(us) for us in zip(*times[best], strict=True))
    if _mean(after) > (1 - _GAIN) * _mean(before):
        return Tuned(subject, now, before, before, *counts)
    return Tuned(subject, best, after, before, *counts)


def _times(role: Role, pair: tuple[Config, Config], one: Sample, rounds: int) -> tuple[float, float]:
    """Median microseconds of both configurations, measured in turns."""
    timed = {
        name: Timed([call_of(role, own, one, cache) for cache in range(len(one.caches))], one.q.device)
        for name, own in zip(("now", "new"), pair, strict=True)
    }
    us = medians(timed, rounds)
    return us["now"], us["new"]


def call_of(role: Role, candidate: Config, one: Sample, cache: int) -> Callable[[], object]:
    """Attention over one of a sample's caches, cut up so.

    Slots are read as they stand: rows that were made of them are another case, in tiles of its own.
    """

    def run() -> object:
        with using(role, candidate), read_in_slots():
            return cached_attention(one.inputs(cache))

    return run


def _sample(subject: Subject, point: Point, device: torch.device, room: int) -> Sample:
    # In the middle of sites that share a cache nothing is appended: attention alone.
    site = replace(subject.site, share="middle", kernels="triton")
    lengths = [point.context] * point.batch
    try:
        return sample(site, subject.heads, subject.dims, lengths, subject.dtype, device, room, point.tokens)
    except torch.OutOfMemoryError as error:
        raise KernelError(
            f"{subject.name}: caches of {point.batch} x {point.context:,} tokens do not fit the GPU: ask for less with "
            "--batch and --context"
        ) from error


def too_large() -> tuple[type[Exception], ...]:
    """What is raised for a candidate that needs more shared memory or registers than there are."""
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
