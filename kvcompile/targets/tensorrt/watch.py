"""How far a build has come, as log lines: an engine of a large model takes minutes."""

from __future__ import annotations

import logging
import time
from typing import Any

from kvcompile.targets.tensorrt.adapter import TensorRT

log = logging.getLogger(__name__)


def monitor(trt: TensorRT) -> Any:
    """An IProgressMonitor that logs each outermost phase with its time; None where TensorRT has no such thing."""
    base = getattr(trt.module, "IProgressMonitor", None)
    if base is None:
        return None

    class Monitor(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.started: dict[str, float] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.started[phase] = time.perf_counter()
            log.debug("%s: %d steps", phase, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            log.debug("%s: step %d", phase, step)
            return True  # go on

        def phase_finish(self, phase: str) -> None:
            if phase in self.started:
                log.info("TensorRT: %s, %.1f s", phase, time.perf_counter() - self.started.pop(phase))

    return Monitor()
