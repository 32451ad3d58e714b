"""Runs a cached graph region by region, eagerly or compiled; compiles a shape class when it first comes."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvcompile.compile.cpu_step import CpuSteps
from kvcompile.compile.cudagraph import StepGraphs
from kvcompile.compile.inductor import Compiled, ShapeClass, Tracer, compile_region, describe
from kvcompile.compile.kept_programs import KeptPrograms
from kvcompile.compile.python_step import Steps
from kvcompile.compile.regions import Regions
from kvcompile.compile.sizes import Number, Symbolic
from kvcompile.util.progress import Progress

log = logging.getLogger(__name__)

# A region, its fake inputs and the tracer of their sizes -> the region compiled.
RegionCompiler = Callable[[GraphModule, Sequence[Any], Tracer], Compiled]


class Executor:
    """Calls the regions in order. Values live in a dict by name and are dropped after their last use."""

    def __init__(
        self,
        regions: Regions,
        mode: str,
        graphs: StepGraphs | None = None,
        compiler: RegionCompiler | None = None,
    ):
        """
        mode:     the recipe's; "none" runs the regions as they are
        graphs:   captures steps; None: every step runs region by region
        compiler: of the recipe's backend; None: Inductor
        """
        self.graphs = graphs
        self.regions = regions
        self.mode = mode
        self.compiler = compiler or partial(compile_region, mode=mode)
        self.steps_apart = compiler is None  # Inductor's: also of modules that run as Python
        # Why steps of such modules are not compiled, though they have graphs: by class of shapes, by path.
        self.told: dict[ShapeClass, dict[str, str]] = {}
        self.step_seconds: dict[str, float] = {}  # that these steps take of `compile_seconds`, by path
        self.compile_seconds: dict[str, float] = {}
        self._programs: dict[ShapeClass, list[Compiled]] = {}
        self.steps = CpuSteps()
        drops: dict[int, list[str]] = {}
        for name, index in regions.last_use.items():
            if name not in regions.weights:
                drops.setdefault(index, []).append(name)
        self._drops = [drops.get(i, []) for i in range(len(regions.calls))]

    @property
    def programs(self) -> dict[ShapeClass, list[Compiled]]:
        """What is compiled: of each class of shapes, the program of each call."""
        return dict(self._programs)

    def take(self, shapes: ShapeClass, programs: Sequence[Compiled]) -> None:
        """Programs that were compiled before, in the place of `prepare`."""
        if len(programs) != len(self.regions.calls):
            raise ValueError(f"{len(programs)} programs for {len(self.regions.calls)} calls")
        self._programs[shapes] = list(programs)

    @property
    def compiled(self) -> bool:
        return self.mode != "none"

    def prepare(self, shapes: ShapeClass, inputs: dict[str, Any], progress: Progress | None = None) -> None:
        """Compile every distinct region for a class of shapes, unless that is done.

        Args:
            inputs: fake-able examples by placeholder name: a Tensor stands for itself with symbolic sizes where
                `dims` of `Symbolic` says so.
        """
        if not self.compiled or shapes in self._programs:
            return
        started = time.perf_counter()
        kept = self._kept(shapes, inputs)
        known = None if kept is None else kept.read(shapes)
        if known is not None:
            self._programs[shapes] = known
            self.compile_seconds[str(shapes)] = time.perf_counter() - started
            log.info("%d programs (%s) are those of an earlier process", len(known), shapes)
            return
        tracer = Tracer(shapes)
        steps = Steps(tracer, self.compiler, self.told.setdefault(shapes, {}), self.step_seconds)
        values: dict[str, Any] = {name: _fake(tracer, value) for name, value in inputs.items()}
        values |= {name: tracer.static(weight) for name, weight in self.regions.weights.items()}
        programs: list[Compiled] = []
        done: dict[tuple[int, str], tuple[Compiled, tuple[Any, ...]]] = {}
        distinct = len(self.regions.modules)
        for call in self.regions.calls:
            args = [values[name] for name in call.inputs]
            key = (call.region, " ".join(map(describe, args)))
            if key not in done:
                module = self.regions.modules[call.region]
                if progress:
                    progress(f"compile {shapes}", len(done), max(distinct, len(done) + 1))
                outputs = tracer.run(module, args)
                region_started = time.perf_counter()
                if call.region not in self.regions.eager:
                    program = self.compiler(module, args, tracer)
                elif shapes.tokens_is_one and self.steps_apart:
                    program = steps.program(module, args)
                else:
                    program = module
                done[key] = (program, outputs)
                log.debug("region %d, %s: %.1f s", call.region, shapes, time.perf_counter() - region_started)
            program, outputs = done[key]
            programs.append(program)
            values.update(zip(call.outputs, outputs, strict=True))
        if progress:
            progress(f"compile {shapes}", len(done), len(done))
        self._programs[shapes] = programs
        if kept is not None:
            kept.keep(shapes, programs)
        self.compile_seconds[str(shapes)] = time.perf_counter() - started
        log.info(
            "compiled %d regions for %d calls (%s) in %.1f s",
            len(done),
            len(programs),
            shapes,
            self.compile_seconds[str(shapes)],
        )

    def _kept(self, shapes: ShapeClass, inputs: dict[str, Any]) -> KeptPrograms | None:
        # Of another backend's programs nobody knows what they depend on; the other steps are compared once compiled.
        if not self.steps_apart or self.regions.eager:
            return None
        return KeptPrograms.of(self.regions, self.mode, shapes, inputs)

    def run(self, shapes: ShapeClass, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Run all regions; `inputs` by placeholder name. `prepare` must have been called for `shapes`."""
        programs: Sequence[Compiled] = (
            self._programs[shapes]
            if self.compiled
            else [self.regions.modules[c.region] for c in self.regions.calls]
        )
        weights = self.regions.weights
        values = dict(inputs)
        with torch.no_grad():
            for call, program, drops in zip(self.regions.calls, programs, self._drops, strict=True):
                results = program(*[values[n] if n in values else weights[n] for n in call.inputs])
                values.update(zip(call.outputs, results, strict=True))
                for name in drops:
                    values.pop(name, None)
        return tuple(values[name] if name in values else weights[name] for name in self.regions.outputs)

    def notes(self, shapes: ShapeClass) -> bool:
        """Whether calls of such a step may be noted: compiled code makes them, and nothing known is against it."""
        return self.compiled and not self.regions.eager and shapes not in self.steps.problems

    def step(
        self, shapes: ShapeClass, moving: dict[str, Any], fixed: dict[str, Tensor], version: int
    ) -> tuple[Tensor, ...]:
        """As `run`, of one token a sequence on a CPU, by calls that were noted; see `CpuSteps.run`."""
        programs = self._programs[shapes]
        return self.steps.run(
            shapes, lambda inputs: self.run(shapes, inputs), programs, moving, fixed, version
        )

    def replay(
        self, shapes: ShapeClass, moving: dict[str, Any], fixed: dict[str, Tensor], version: int
    ) -> tuple[Tensor, ...]:
        """As `run`, by a graph of the step; see `StepGraphs.run`."""
        assert self.graphs is not None, "only a program that captures its steps replays them"
        return self.graphs.run(shapes, lambda inputs: self.run(shapes, inputs), moving, fixed, version)

    def digest(self) -> str:
        """A hash of the code of all regions, for cache keys and dumps."""
        text = "\n".join(module.code for module in self.regions.modules)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fake(tracer: Tracer, value: Any) -> Any:
    if isinstance(value, Symbolic):
        shape = [tracer.size(dim) if isinstance(dim, str) else dim for dim in value.shape]
        return tracer.empty(shape, value.dtype, value.device)
    if isinstance(value, Tensor):
        return tracer.static(value)
    return tracer.size(value.name) if isinstance(value, Number) else value
