"""The cases that benchmarks measure (`benchmarks/kernel_cases.py`, under the same names), as shapes for the model.

Attention alone, without the write of the new token, as there; a case of the role append alone says so by its name, and
two steps are measured whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.predict.facts import Facts, Progress, facts
from kvcompile.kernels.triton.predict.launch import Predicted, predicted
from kvcompile.kernels.triton.predict.memory import case_bytes
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.recorded import Made, Shape, recorded
from kvcompile.layouts import (
    CacheLayout,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    fp8,
    int8,
    per_channel,
    uint,
)
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from kvcompile.util.machines import Machine

_DIM, _LONG = 128, 32768
_BUDGET = 8192
_HEADS = (32, 8)


@dataclass(frozen=True)
class Case:
    """A shape by the name that it is measured under. only: the one role that is measured; None: all launches"""

    name: str
    shape: Shape
    only: str | None = None


@dataclass(frozen=True)
class CaseTime:
    """What is predicted of a case. bytes: as benchmarks count them"""

    name: str
    seconds: float
    bytes: int
    share: float
    launches: tuple[Predicted, ...]


def _case(
    name: str,
    lengths: tuple[int, ...],
    layout: CacheLayout | None = None,
    heads: tuple[int, int] = _HEADS,
    score: ScoreSpec | None = None,
    window: int | None = None,
    share: Literal["none", "middle"] = "middle",
    rotary: RotaryForm | None = None,
    only: str | None = None,
) -> Case:
    mask = MaskSpec("causal") if window is None else MaskSpec("sliding", window)
    site = SiteSpec(layout or CacheLayout(), _DIM**-0.5, mask, score or ScoreSpec(), rotary, share=share)
    return Case(name, Shape(site, heads, (_DIM, _DIM), torch.bfloat16, lengths), only)


def _pages(size: int) -> CacheLayout:
    return CacheLayout(placement=Paged(size))


def _rising(first: int, last: int, batch: int) -> tuple[int, ...]:
    return tuple(first + (last - first) * row // (batch - 1) for row in range(batch))


_INT8 = CacheLayout(int8(), int8())
_INT4 = CacheLayout(uint(4, 32), uint(4, 32))
_KIVI4 = CacheLayout(per_channel(4, 32, 128), replace(uint(4, 32), residual=128))
_STREAM = CacheLayout(placement=Ring(), retention=SinkWindow(4, _BUDGET - 4))
_H2O = CacheLayout(placement=Slots(), retention=Scored(4, _BUDGET // 2 - 4, _BUDGET // 2))
_PLAIN, _MANY, _HALF = (4096,) * 32, (_LONG,) * 32, RotaryForm("half", 0, _DIM)
SKEWED = "bf16 B64 one of 64k among 1k pages of 64"
CASES = (
    _case("bf16 B32 4k", _PLAIN),
    _case("bf16 B1 32k", (_LONG,)),
    _case("fp8 B1 256k 32/4", (262144,), CacheLayout(fp8(), fp8()), (32, 4)),
    _case("int8 B32 4k", _PLAIN, _INT8),
    _case("fp8 B32 4k", _PLAIN, CacheLayout(fp8(), fp8())),
    _case("bf16 B32 32k", _MANY),
    _case("int4 B32 32k", _MANY, _INT4),
    _case("kivi4 B32 32k", _MANY, _KIVI4),
    _case("bf16 B32 4k softcap", _PLAIN, score=ScoreSpec(softcap=30.0)),
    _case("bf16 B32 4k alibi", _PLAIN, score=ScoreSpec(bias=BiasSpec("alibi"))),
    _case("bf16 B32 4k sinks", _PLAIN, score=ScoreSpec(sinks=True)),
    _case("bf16 B32 4k window", _PLAIN, window=4096),
    _case("bf16 B32 4k pages of 128", _PLAIN, _pages(128)),
    _case("bf16 B32 4k pages of 16", _PLAIN, _pages(16)),
    _case("bf16 B16 8k slots", (2 * _BUDGET,) * 16, _STREAM, share="none"),
    _case("bf16 B16 8k slots h2o", (2 * _BUDGET,) * 16, _H2O, share="none"),
    _case("bf16 B64 1k-64k pages of 64", _rising(1024, 65536, 64), _pages(64)),
    _case(SKEWED, (65536,) + (1024,) * 63, _pages(64)),
    *(
        _case(f"append int8 B{batch}", (4096,) * batch, _INT8, share="none", rotary=_HALF, only="append")
        for batch in (1, 32, 256)
    ),
)


def launches_of(case: Case, machine: Machine) -> tuple[Made, ...]:
    """What a case launches, of that what is measured."""
    return tuple(one for one in recorded(case.shape, machine) if case.only in (None, one.spec.role))


def time_of(case: Case, made: tuple[Made, ...], found: Facts, model: Model) -> CaseTime:
    """What is predicted of a case whose kernels have facts; raises as `launch.predicted`."""
    launches = predicted(made, case.shape, found, model)
    seconds = sum(one.seconds for one in launches)
    moved = int(sum(one.bytes for one in launches)) if case.only else case_bytes(case.shape)
    return CaseTime(case.name, seconds, moved, moved / seconds / model.machine.copied, launches)


def times(model: Model, made: Mapping[Case, tuple[Made, ...]], found: Facts) -> dict[str, CaseTime]:
    """Of each case, by its name, what is predicted."""
    return {case.name: time_of(case, launches, found, model) for case, launches in made.items()}


def prepared(
    machine: Machine, cases: Iterable[Case] = CASES, progress: Progress | None = None
) -> tuple[dict[Case, tuple[Made, ...]], Facts]:
    """The launches of cases on a machine, and the facts of their kernels; those that no cache has are assembled."""
    made = {case: launches_of(case, machine) for case in cases}
    return made, facts((one.request for launches in made.values() for one in launches), progress)
