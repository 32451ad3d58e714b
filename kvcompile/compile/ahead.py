"""What the C++ compiler makes, begun in the background as soon as it is known to be needed.

Where no cache has it, it takes seconds, in processes beside which Python goes on. The model's own forwards have all
cores; from when it is traced on, which takes Python seconds on one of them, in this order, what is made for a machine
and not for a model:

| what | who waits for it |
|---|---|
| the launcher of generated C++ kernels | the plan, which asks whether they can run |
| the header of Inductor's kernels, precompiled, which tries the instruction set that it took | its first kernel |
| Inductor's own look at instruction sets, where it does not take the best | its first kernel, while it is written |
| the kernels of linear layers | the first prompt and step |

Once its graph is traced, while that is compared and verified: the attention kernels of its plan, which verification
runs. On a machine that has no core beside
those of Python and of what it waits for, all but the launcher waits until the model is verified. The header of a model
whose proof was kept is not begun: its kernels and programs are likely to be kept, too.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from kvcompile.compile import instruction_sets
from kvcompile.kernels.spec import SiteSpec
from kvcompile.plan import INDUCTOR, Decision, Plan
from kvcompile.recipe import Recipe
from kvcompile.util.threads import take_core

log = logging.getLogger(__name__)
_Made = TypeVar("_Made")
_NAME = "kvcompile-ahead"
_LAUNCHER, _HEADER, _TRIAL = "launcher", "header", "a trial"
_NICE = 5  # of what is not waited for yet: what is has the cores first, though not for ever
_CORES = 3  # for Python, what it waits for, and what it does not
_LOCK = threading.Lock()
_begun: set[str] = set()
_looking: list[threading.Event] = []  # Inductor's own looks at instruction sets; set once they have ended
_trials: list[Future[bool]] = []  # of instruction sets that Inductor took: whether they work
_optimizing: list[threading.Event] = []  # models that are understood and verified; set once that has ended


def begin(model: nn.Module, recipe: Recipe) -> threading.Event:
    """Begin what `recipe` will need of the compiler for a model on a CPU; each thing once in a process.

    What fails here is not told: whoever needs it asks again, and tells.

    Returns what is set once there is a core for something else beside Python.
    """
    tensor = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if tensor is not None:
        return begin_for(tensor.device, tensor.dtype, recipe)
    return _set()


def begin_for(device: torch.device, dtype: torch.dtype | None, recipe: Recipe) -> threading.Event:
    """The same for a model that is still to be loaded; dtype: of its weights, None where it is not known yet."""
    options = recipe.compile
    if device.type != "cpu" or options.mode == "none":
        return _set()
    kernels, inductor = options.kernels in ("auto", "cpp"), options.backend == INDUCTOR
    wanted: dict[str, Callable[[], object]] = {}
    if kernels:
        from kvcompile.kernels.cpp.available import problem

        wanted[_LAUNCHER] = lambda: problem(device)
    if inductor:
        wanted |= _instruction_sets()
    if kernels and inductor and dtype is not None:
        from kvcompile.kernels.cpp.host.source import linear_kernels

        wanted[f"linear layers in {dtype}"] = lambda: linear_kernels(dtype)
    made = _begin(wanted, _NICE)
    return made if _few_cores() else _set()


def _instruction_sets() -> dict[str, Callable[[], object]]:
    """Once in a process, what is still to be done for Inductor to know its sets."""
    # Modules are imported here: two threads that import PyTorch's could meet halves of them.
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

    with _LOCK:
        if "instruction sets" in _begun:
            return {}
        _begun.add("instruction sets")
    best = None
    try:
        best = instruction_sets.take()
    except Exception as error:  # another release of PyTorch
        log.debug("Inductor's best instruction set: %s", error)
    if best is None:
        looked = threading.Event()
        _looking.append(looked)
        return {"a look": lambda: _look(looked)}
    trial: Future[bool] = Future()
    _trials.append(trial)
    return {_TRIAL: lambda: _try(best, trial)}


def _look(looked: threading.Event) -> None:
    try:
        instruction_sets.look()
    finally:
        looked.set()


def _try(best: object, trial: Future[bool]) -> None:
    works = False
    try:
        works = instruction_sets.confirmed(best)
        if not works:
            with _LOCK:
                _begun.add(_HEADER)  # which it makes
            works = instruction_sets.confirm(best)
    finally:
        trial.set_result(works)


def begin_kernels(plan: Plan) -> None:
    """Begin the C++ kernels that `plan` runs attention with; each once in a process. As `begin`."""
    alike = {_arithmetic(decision): decision for decision in plan.decisions if decision.kernels == "cpp"}
    wanted: dict[str, Callable[[], object]] = {}
    for decision in alike.values():
        wanted |= _kernels(decision, plan.torch_dtype)
    _begin(wanted, nice=0)


def begin_header(device: torch.device, recipe: Recipe) -> None:
    """Begin the header of Inductor's kernels, where it was compiled before and may be gone. As `begin`."""
    options = recipe.compile
    if device.type == "cpu" and options.backend == INDUCTOR and options.mode != "none":
        _begin({_HEADER: _precompile_header}, _NICE)


def _precompile_header() -> None:
    wait()
    instruction_sets.precompile_header()


@contextmanager
def optimizing() -> Iterator[None]:
    """While a model is understood and verified: what only a prompt waits for is begun afterwards, where cores are few.

    Two of them are often one core's two halves, and what is done beside Python makes it slower.
    """
    ended = threading.Event()
    _optimizing.append(ended)
    try:
        yield
    finally:
        _optimizing.remove(ended)
        ended.set()


def _wait_for_optimize(core: threading.Event) -> threading.Event:
    """Wait until nothing is understood or verified, and give the core away meanwhile; gives the core from then on."""
    core.set()
    for ended in tuple(_optimizing):
        ended.wait()
    return take_core()


def _arithmetic(decision: Decision) -> tuple[SiteSpec, tuple[int, int], tuple[int, int]]:
    """All that the kernels of a layer depend on, but the dtype."""
    heads, dims = (decision.num_qo_heads, decision.num_kv_heads), (decision.head_dim, decision.v_head_dim)
    return decision.site_spec(), heads, dims


def _kernels(decision: Decision, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    # Modules are imported, and texts written, here: see `_instruction_sets`.
    from kvcompile.kernels.cpp.host.launches import launches
    from kvcompile.kernels.cpp.host.source import compiled, text_of
    from kvcompile.kernels.cpp.isa import isa

    own = isa()
    found: dict[str, Callable[[], object]] = {}
    for launch in launches(*_arithmetic(decision), dtype, own):
        if launch.role != "linear" and launch.spec not in _begun:
            found[launch.spec] = partial(compiled, text_of(launch.spec), own)
    return found


def wait() -> None:
    """Wait until Inductor does not look at instruction sets itself, before it is asked for a program.

    That is no business of two threads at once: while one of them tries a flag, it stands in the command line of the
    other, and libraries get names that no later process finds.
    """
    for ended in tuple(_optimizing):  # what is compiled while a model is verified waits for nothing
        ended.set()
    for looked in tuple(_looking):
        looked.wait()


def compiling(make: Callable[[], _Made]) -> _Made:
    """What `make` has Inductor compile; once more where the set that it had taken turns out not to work meanwhile."""
    wait()
    doubted = [trial for trial in _trials if not trial.done()]
    try:
        with instruction_sets.COMPILING:
            return make()
    except Exception:
        if all(trial.result() for trial in doubted):
            raise
    with instruction_sets.COMPILING:
        return make()


def _begin(wanted: Mapping[str, Callable[[], object]], nice: int) -> threading.Event:
    """Make what nobody has begun, in a thread; gives what is set once the first of it is made."""
    with _LOCK:
        new = {name: make for name, make in wanted.items() if name not in _begun}
        _begun.update(new)
        if not new:
            return _set()
        core, first = take_core(), threading.Event()
        threading.Thread(target=_run, args=(new, nice, core, first), name=_NAME, daemon=True).start()
        return first


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _few_cores() -> bool:
    return (os.cpu_count() or 1) < _CORES


def _run(
    wanted: Mapping[str, Callable[[], object]], nice: int, core: threading.Event, first: threading.Event
) -> None:
    # On Linux a thread has its own, which the processes that it starts inherit.
    if nice and sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    try:
        for name, make in wanted.items():
            if nice and name != _LAUNCHER and _few_cores():
                first.set()  # who waits for it, the model's own optimization may wait for
                core = _wait_for_optimize(core)
            try:
                make()
            except Exception as error:
                log.debug("%s, ahead of time: %s", name, error)
            first.set()
    finally:
        first.set()
        core.set()
