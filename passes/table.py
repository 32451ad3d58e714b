"""The passes, in the order in which a model goes through them: listed, timed, dumped, and some switched off.

A pass is a function with `@graph_pass(name)`. While somebody watches (`watched`), each run is noted with its seconds,
the nodes of the graph that it leaves, and the graph's text where that is asked for. `KVCOMPILE_DISABLE=name,name`
leaves passes out that are optional: what comes out computes the same without them.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch.fx import Graph, GraphModule

from kvcompile.errors import PlanError

VARIABLE = "KVCOMPILE_DISABLE"
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Pass:
    """One pass: its name, what it does, the file that it is in, and whether it may be left out."""

    name: str
    does: str
    file: str
    optional: bool = False


PASSES = (
    Pass("capture", "traces the model into one graph with free sizes", "passes/capture/capture.py"),
    Pass("inline", "makes submodules of the traced graph part of it", "passes/capture/inline.py"),
    Pass(
        "traced_once",
        "traces the first of equal layers, and copies its nodes for the others",
        "passes/capture/traced_once.py",
        optional=True,
    ),
    Pass("flex", "spells FlexAttention out", "passes/capture/flex.py"),
    Pass("functionalize", "makes in-place writes values", "passes/capture/functionalize.py"),
    Pass("subclasses", "opens weights that are tensor subclasses", "passes/capture/subclasses.py"),
    Pass(
        "clean", "drops guards, no-ops and dead code, and spells operators one way", "passes/rewrite/clean.py"
    ),
    Pass(
        "last_token",
        "gives the logits of chosen tokens where the model gives the last's",
        "passes/capture/last_token.py",
    ),
    Pass(
        "python_step",
        "traces a decode step of each module that runs as Python, to compile it",
        "passes/capture/python_step.py",
        optional=True,
    ),
    Pass("detect", "finds the attention sites, or says what is in the way", "passes/detect/detect.py"),
    Pass("canonicalize", "makes each attention block one node", "passes/rewrite/canonicalize.py"),
    Pass("positions", "puts new tokens behind the cached ones", "passes/rewrite/positions.py"),
    Pass(
        "rope_on_append",
        "gives RoPE to the generated kernels that append",
        "kvcompile/decide/rope_on_append.py",
        optional=True,
    ),
    Pass("absorb", "lets sites attend over latent rows (MLA)", "passes/rewrite/absorb.py"),
    Pass("shard", "divides heads and weights over the ranks of a group", "passes/shard/shard.py"),
    Pass(
        "stages", "cuts it where one value crosses, into the layers of each stage", "passes/stages/stage.py"
    ),
    Pass("insert_cache", "makes each attention node one with a cache", "passes/rewrite/insert_cache.py"),
    Pass(
        "gemv",
        "gives linear layers of one token a form that reads weights once, while they are compiled",
        "kvcompile/compile/gemv.py",
        optional=True,
    ),
    Pass(
        "norms",
        "makes RMSNorm a part of the linear layers around it, in steps of one token on GPUs",
        "kvcompile/compile/norms.py",
        optional=True,
    ),
)


@dataclass(frozen=True)
class PassRun:
    """One run of a pass: its seconds, without those of passes inside it.

    nodes: of the graph that it leaves; None: it leaves none
    code:  that graph as text, where it is kept
    """

    name: str
    seconds: float
    nodes: int | None = None
    code: str | None = None


@dataclass(frozen=True)
class PassReport:
    """All runs of one pass."""

    name: str
    runs: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {self.runs} runs, {self.seconds:.2f} s"


@dataclass
class _Watch:
    runs: list[PassRun]
    code: bool


_watch: ContextVar[_Watch | None] = ContextVar("kvcompile_passes", default=None)


def disabled(name: str) -> bool:
    """Whether KVCOMPILE_DISABLE (names, with commas between) leaves an optional pass out, to bisect.

    Raises:
        PlanError: it has a name that no optional pass has.
    """
    asked = {part.strip() for part in os.environ.get(VARIABLE, "").split(",")} - {""}
    optional = [each.name for each in PASSES if each.optional]
    for other in sorted(asked.difference(optional)):
        problem = "cannot be left out" if _listed(other) else "is no pass"
        raise PlanError(
            f"{VARIABLE}={other}: {other!r} {problem}; those that can be are {', '.join(optional)}"
        )
    assert name in optional, name
    return name in asked


def graph_pass(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Enter a function into the table as the pass `name`."""
    listed = _listed(name)
    assert listed is not None, f"{name} is not in the table of passes"

    def enter(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            watch = _watch.get()
            if watch is None or (listed.optional and disabled(name)):
                return function(*args, **kwargs)
            place, started = len(watch.runs), time.perf_counter()
            watch.runs.append(PassRun(name, 0.0))  # before the passes inside it
            try:
                result = function(*args, **kwargs)
            except BaseException:
                del watch.runs[place]
                raise
            inside = sum(run.seconds for run in watch.runs[place + 1 :])
            seconds = time.perf_counter() - started - inside
            graph = _graph_of(result) or next(filter(None, map(_graph_of, args)), None)
            code = _code_of(graph) if watch.code and graph is not None else None
            watch.runs[place] = PassRun(name, seconds, None if graph is None else len(graph.nodes), code)
            return result

        return run

    return enter


@contextmanager
def watched(code: bool = False) -> Iterator[list[PassRun]]:
    """Note the runs of passes in this block, in the list of who watches already, if somebody does.

    code: whether the text of each graph is kept
    """
    active = _watch.get()
    if active is not None:
        yield active.runs
        return
    watch = _Watch([], code)
    token = _watch.set(watch)
    try:
        yield watch.runs
    finally:
        _watch.reset(token)


def totals(runs: Sequence[PassRun]) -> tuple[PassReport, ...]:
    """The runs of each pass together, in the order of the table."""
    found = []
    for each in PASSES:
        own = [run.seconds for run in runs if run.name == each.name]
        if own:
            found.append(PassReport(each.name, len(own), sum(own)))
    return tuple(found)


def _listed(name: str) -> Pass | None:
    return next((each for each in PASSES if each.name == name), None)


def _graph_of(value: Any) -> Graph | None:
    """The graph of what a pass takes or returns: a module, or a record with one."""
    if isinstance(value, Graph):
        return value
    if isinstance(value, tuple) and value:
        value = value[0]
    if not isinstance(value, GraphModule):
        value = getattr(value, "graph_module", None)
    return value.graph if isinstance(value, GraphModule) else None


def _code_of(graph: Graph) -> str:
    return str(graph.python_code("self", verbose=True).src)
