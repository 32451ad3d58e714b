"""Decode steps of modules that run as Python, compiled.

A region that calls a module's Python has, for one token, a graph of it besides (passes/capture/python_step.py). It is
compiled as regions are; modules whose graphs have the same text share one program, with weights of their own. The
program runs where all sequences have tokens and none is padded, which is looked up in every call; else the Python does.

What Inductor has made is compared with the Python (passes/capture/step_proof.py) before it is used. Where it fails, or
gives something else, the module stays in Python, and `told` says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.compile.inductor import Compiled, Tracer, describe
from kvcompile.compile.regions import text_of
from kvcompile.errors import CompileError
from kvcompile.kernels.ops.opaque import OpaqueModule, find, mixer
from kvcompile.passes.capture.step_graph import StepGraph
from kvcompile.passes.capture.step_proof import differs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """What a region that calls a module takes: the places of the module's inputs, its state, and `rows`."""

    record: OpaqueModule
    inputs: tuple[int, ...]
    state: tuple[int, ...]
    rows: int | None

    @classmethod
    def of(cls, region: GraphModule) -> Call:
        given = [node for node in region.graph.nodes if node.op == "placeholder"]
        places = {node: place for place, node in enumerate(given)}
        call = next(node for node in region.graph.nodes if node.op == "call_function" and _calls(node))
        if call.target is not mixer:
            inputs, key = call.args
            return cls(find(str(key)), _of(places, inputs), (), None)
        inputs, state, rows, key = call.args
        assert isinstance(rows, Node)
        return cls(find(str(key)), _of(places, inputs), _of(places, state), places[rows])


def _of(places: dict[Node, int], nodes: Any) -> tuple[int, ...]:
    return tuple(places[node] for node in nodes)


def _calls(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "kvcompile"


class Step:
    """A region for one token: compiled where every sequence goes on, else as it is."""

    def __init__(self, compiled: Compiled, region: GraphModule, call: Call, weights: Sequence[Tensor]):
        self.compiled, self.region, self.weights = compiled, region, tuple(weights)
        self._taken, self._rows = (*call.inputs, *call.state), call.rows

    def __call__(self, *values: Any) -> Sequence[Any]:
        if self._rows is not None:
            pads, seen = values[self._rows].tolist()
            if any(pads) or not all(seen):
                return self.region(*values)  # type: ignore[no-any-return]
        return self.compiled(*[values[place] for place in self._taken], *self.weights)


class Steps:
    """The steps of one class of shapes."""

    def __init__(
        self,
        tracer: Tracer,
        compiler: Callable[[GraphModule, Sequence[Any], Tracer], Compiled],
        told: dict[str, str],
        seconds: dict[str, float],
    ):
        """
        told:    gets why a module that has a graph is not compiled, by its path
        seconds: gets what compiling and comparing have taken, by the path of the first of equal modules
        """
        self.tracer, self.compiler, self.told, self.seconds = tracer, compiler, told, seconds
        self._known: dict[tuple[str, ...], Compiled | str] = {}

    def program(self, region: GraphModule, args: Sequence[Any]) -> Compiled:
        """What runs a region that calls a module, for its fake arguments."""
        call = Call.of(region)
        graph = call.record.steps.get(isinstance(self.tracer.batch, int))
        if not isinstance(graph, StepGraph):
            return region
        taken = [args[place] for place in (*call.inputs, *call.state)]
        taken += [self.tracer.static(weight) for weight in graph.weights]
        key = (text_of(graph.graph_module.graph), *map(describe, taken))
        if key not in self._known:
            self._known[key] = self._compiled(call, graph, taken)
        found = self._known[key]
        if isinstance(found, str):
            self.told[call.record.path] = found
            return region
        return Step(found, region, call, graph.weights)

    def _compiled(self, call: Call, graph: StepGraph, args: Sequence[Any]) -> Compiled | str:
        started = time.perf_counter()
        try:
            program = self.compiler(graph.graph_module, args, self.tracer)
        except CompileError as error:
            return str(error)

        def run(inputs: Sequence[Tensor], state: Sequence[Tensor]) -> Sequence[Tensor]:
            with torch.no_grad():
                return program(*inputs, *state, *graph.weights)

        for rows in (1,) if isinstance(self.tracer.batch, int) else (2, 3):
            if problem := differs(call.record, call.record.example, run, rows):
                return f"what Inductor made of its step does not give what it gives: {problem}"
        seconds = time.perf_counter() - started
        self.seconds[call.record.path] = self.seconds.get(call.record.path, 0.0) + seconds
        log.debug("step of %s: %.1f s", call.record.path, seconds)
        return program
