"""What is compiled for a machine and not for a model, begun in the background while a model is looked at.

Where no cache has them, each takes seconds of a compiler, in processes beside which Python goes on. In this order:

| what | who waits for it |
|---|---|
| the launcher of generated C++ kernels | the plan, which asks whether they can run |
| Inductor's look at instruction sets | its first kernel, while it is written |
| the header of its kernels, precompiled | its first kernel, when it is compiled: Inductor has a lock for it |
| the kernels of linear layers | the first prompt and step |
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

from kvcompile.compile import instruction_sets
from kvcompile.plan import INDUCTOR
from kvcompile.recipe import Recipe

log = logging.getLogger(__name__)
_NAME = "kvcompile-ahead"
_NICE = 5  # what waits for a result has the cores first; others on the machine do not have them for ever
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
        wanted["header"] = _precompile_header
    if kernels and inductor and dtype is not None:
        from kvcompile.kernels.cpp.host.source import linear_kernels

        wanted[f"linear layers in {dtype}"] = lambda: linear_kernels(dtype)
    with _LOCK:
        new = {name: make for name, make in wanted.items() if name not in _begun}
        _begun.update(new)
        if _LOOK in new:
            _looking.append(looked)
        if new:
            threading.Thread(target=_run, args=(new,), name=_NAME, daemon=True).start()


def wait() -> None:
    """Wait until nobody looks at instruction sets, before Inductor is asked to compile.

    That is no business of two threads at once: while one of them tries a flag, it stands in the command line of the
    other, and libraries get names that no later process finds.
    """
    for looked in tuple(_looking):
        looked.wait()


_LOOK = "instruction sets"


def _look(looked: threading.Event) -> None:
    try:
        instruction_sets.look()
    finally:
        looked.set()


def _precompile_header() -> None:
    """Have Inductor precompile what its kernels include: of a kernel that is given to nobody to compile, that alone."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    text = 'extern "C" void kernel(float* out) {}'
    CppPythonBindingsCodeCache.load_pybinding_async(["float*"], text, submit_fn=lambda compile_it: None)


def _run(wanted: dict[str, Callable[[], object]]) -> None:
    if sys.platform == "linux":  # where a thread has its own, which the processes that it starts inherit
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    for name, make in wanted.items():
        try:
            make()
        except Exception as error:
            log.debug("%s, ahead of time: %s", name, error)
