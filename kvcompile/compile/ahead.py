"""What is compiled for a machine and not for a model, begun in the background while a model is looked at.

Inductor compiles a small file for each instruction set that it may use, one after the other, and the ops of generated
C++ kernels have a launcher. Where no cache has them, both take seconds, in processes beside which Python goes on.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from torch import nn

from kvcompile.plan import INDUCTOR
from kvcompile.recipe import Recipe

log = logging.getLogger(__name__)
_NAME = "kvcompile-ahead"
_NICE = 15  # what waits for a result has the cores first
_LOCK = threading.Lock()
_begun: set[str] = set()
_running: list[threading.Thread] = []


def begin(model: nn.Module, recipe: Recipe) -> None:
    """Begin what `recipe` will need of the compiler for a model on a CPU; each thing once in a process.

    What fails here is not told: whoever needs it asks again, and tells.
    """
    tensor = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    options = recipe.compile
    if tensor is None or tensor.device.type != "cpu" or options.mode == "none":
        return
    wanted: dict[str, Callable[[], object]] = {}
    if options.kernels in ("auto", "cpp"):
        from kvcompile.kernels.cpp.available import problem

        wanted["launcher"] = lambda: problem(tensor.device)
    if options.backend == INDUCTOR:
        # Modules are imported here: two threads that import PyTorch's could meet halves of them.
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

        wanted["instruction sets"] = cpu_vec_isa.valid_vec_isa_list
    with _LOCK:
        new = {name: make for name, make in wanted.items() if name not in _begun}
        _begun.update(new)
        if new:
            _running.append(threading.Thread(target=_run, args=(new,), name=_NAME, daemon=True))
            _running[-1].start()


def wait() -> None:
    """Wait for what was begun, before Inductor is asked to compile.

    Its look at instruction sets is no business of two threads at once: while one of them tries a flag, it stands in the
    command line of the other, and libraries get names that no later process finds.
    """
    for thread in tuple(_running):
        thread.join()


def _run(wanted: dict[str, Callable[[], object]]) -> None:
    if sys.platform == "linux":  # where a thread has its own, which the processes that it starts inherit
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    for name, make in wanted.items():
        try:
            make()
        except Exception as error:
            log.debug("%s, ahead of time: %s", name, error)
