"""What the C++ compiler makes, begun in the background as soon as it is known to be needed.

Where no cache has it, it takes seconds, in processes beside which Python goes on. While a model is looked at, in this
order, what is made for a machine and not for a model:

| what | who waits for it |
|---|---|
| the launcher of generated C++ kernels | the plan, which asks whether they can run |
| Inductor's look at instruction sets, by its kernels' header, precompiled | its first kernel, while it is written |
| that header, where the look was kept | its first kernel, when it is compiled: Inductor has a lock for it |
| the kernels of linear layers | the first prompt and step |

While it is verified: the attention kernels of its plan, which verification runs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import nn

from kvcompile.compile import instruction_sets
from kvcompile.plan import INDUCTOR, Decision, Plan
from kvcompile.recipe import Recipe

log = logging.getLogger(__name__)
_NAME = "kvcompile-ahead"
_LOOK = "instruction sets"
_NICE = 5  # of what is not waited for yet: what is has the cores first, though not for ever
_LOCK = threading.Lock()
_begun: set[str] = set()
_looking: list[threading.Event] = []  # at instruction sets; set once that has ended


def begin(model: nn.Module, recipe: Recipe) -> None:
    """Begin what `recipe` will need of the compiler for a model on a CPU; each thing once in a process.

    What fails here is not told: whoever needs it asks again, and tells.
    """
    tensor = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if tensor is not None:
        begin_for(tensor.device, tensor.dtype, recipe)


def begin_for(device: torch.device, dtype: torch.dtype | None, recipe: Recipe) -> None:
    """The same for a model that is still to be loaded; dtype: of its weights, None where it is not known yet."""
    options = recipe.compile
    if device.type != "cpu" or options.mode == "none":
        return
    kernels, inductor = options.kernels in ("auto", "cpp"), options.backend == INDUCTOR
    wanted: dict[str, Callable[[], object]] = {}
    looked = threading.Event()
    if kernels:
        from kvcompile.kernels.cpp.available import problem

        wanted["launcher"] = lambda: problem(device)
    if inductor:
        # Modules are imported here: two threads that import PyTorch's could meet halves of them.
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

        wanted[_LOOK] = lambda: _look(looked)
        wanted["header"] = instruction_sets.precompile_header
    if kernels and inductor and dtype is not None:
        from kvcompile.kernels.cpp.host.source import linear_kernels

        wanted[f"linear layers in {dtype}"] = lambda: linear_kernels(dtype)
    _begin(wanted, _NICE, looked)


def _begin(
    wanted: Mapping[str, Callable[[], object]], nice: int, looked: threading.Event | None = None
) -> None:
    """Make what nobody has begun, in a thread; looked: set once a look at instruction sets among it has ended."""
    with _LOCK:
        new = {name: make for name, make in wanted.items() if name not in _begun}
        _begun.update(new)
        if looked is not None and _LOOK in new:
            _looking.append(looked)
        if new:
            threading.Thread(target=_run, args=(new, nice), name=_NAME, daemon=True).start()


def begin_kernels(*plans: Plan) -> None:
    """Begin the C++ kernels that `plans` run attention with, in their order; each once in a process. As `begin`."""
    wanted: dict[str, Callable[[], object]] = {}
    for plan in plans:
        for decision in plan.decisions:
            if decision.kernels == "cpp":
                wanted |= _kernels(decision, plan.torch_dtype)
    _begin(wanted, nice=0)


def _kernels(decision: Decision, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    # Modules are imported, and texts written, here: see `begin_for`.
    from kvcompile.kernels.cpp.host.launches import launches
    from kvcompile.kernels.cpp.host.source import compiled, text_of
    from kvcompile.kernels.cpp.isa import isa

    heads, dims = (decision.num_qo_heads, decision.num_kv_heads), (decision.head_dim, decision.v_head_dim)
    own = isa()
    found: dict[str, Callable[[], object]] = {}
    for launch in launches(decision.site_spec(), heads, dims, dtype, own):
        if launch.role != "linear" and launch.spec not in _begun:
            found[launch.spec] = partial(compiled, text_of(launch.spec), own)
    return found


def wait() -> None:
    """Wait until nobody looks at instruction sets, before Inductor is asked to compile.

    That is no business of two threads at once: while one of them tries a flag, it stands in the command line of the
    other, and libraries get names that no later process finds.
    """
    for looked in tuple(_looking):
        looked.wait()


def _look(looked: threading.Event) -> None:
    try:
        instruction_sets.look()
    finally:
        looked.set()


def _run(wanted: Mapping[str, Callable[[], object]], nice: int) -> None:
    # On Linux a thread has its own, which the processes that it starts inherit.
    if nice and sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    for name, make in wanted.items():
        try:
            make()
        except Exception as error:
            log.debug("%s, ahead of time: %s", name, error)
