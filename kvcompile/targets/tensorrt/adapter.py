"""The TensorRT that is installed, whichever of its packages that is.

| import | what it is | where from |
|---|---|---|
| tensorrt | TensorRT, for data-centre and other GPUs; builds for the GPU that is there | NVIDIA's index |
| tensorrt_rtx | TensorRT for RTX, as NVIDIA's own archive installs it | NVIDIA |
| tensorrt_rtx_bindings | TensorRT for RTX from PyPI; builds with neither GPU nor driver | PyPI |

All have the same builder, parser and network. What differs is asked of the module (`hasattr`), never of its version.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcompile.errors import ExportError

PACKAGES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")
INSTALL = (
    "pip install 'kvcompile[tensorrt]' (TensorRT for RTX, builds without a GPU), or TensorRT from NVIDIA's index: "
    "pip install tensorrt --extra-index-url https://pypi.nvidia.com"
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorRT:
    """One importable TensorRT.

    module: the Python module; everything in it is untyped
    """

    module: Any
    package: str
    version: str

    @property
    def rtx(self) -> bool:
        """Whether this is TensorRT for RTX, which can build for GPUs that are not there."""
        return hasattr(self.module.IBuilderConfig, "set_compute_capability")

    @property
    def targets(self) -> tuple[str, ...]:
        """The compute capabilities that it can build for by name, as in `SM89`; none where it takes the GPU's own."""
        known = getattr(self.module, "ComputeCapability", None)
        if not self.rtx or known is None:
            return ()
        return tuple(sorted((name for name in known.__members__ if name.startswith("SM")), key=_number))

    @property
    def network_flags(self) -> int:
        """Strongly typed; since TensorRT 11 there is nothing else, and no flag."""
        flag = getattr(self.module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        return 0 if flag is None else 1 << int(flag)

    def logger(self, errors: list[str]) -> Any:
        """An ILogger that passes messages on to `logging`, and keeps those of errors in `errors`.

        It must live as long as what was made with it.
        """
        severity = self.module.ILogger
        levels = {
            severity.INTERNAL_ERROR: logging.ERROR,
            severity.ERROR: logging.ERROR,
            severity.WARNING: logging.INFO,  # of what its caller cannot change: unused inputs, int64 bindings
            severity.INFO: logging.INFO,
            severity.VERBOSE: logging.DEBUG,
        }

        class Logger(severity):  # type: ignore[misc, valid-type]
            def log(self, level: Any, message: str) -> None:
                found = levels.get(level, logging.INFO)
                if found == logging.ERROR:
                    errors.append(message)  # raised by who called, with what it means
                    found = logging.DEBUG
                log.log(found, "%s", message)

        return Logger()


def load(packages: Sequence[str] = PACKAGES) -> TensorRT:
    """The first of `packages` that can be imported.

    Raises:
        ExportError: none can; each with its reason, and what to install.
    """
    reasons = []
    for name in packages:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # a missing package, library or driver
            reasons.append(f"{name}: {' '.join(str(error).split())}")
            continue
        if hasattr(module, "Builder") and hasattr(module, "OnnxParser"):
            return TensorRT(module, name, str(module.__version__))
        reasons.append(f"{name}: no builder or ONNX parser in it (a package of that name for running only?)")
    lines = "\n".join(f"  - {reason}" for reason in reasons)
    raise ExportError(f"TensorRT cannot be imported:\n{lines}\nInstall one: {INSTALL}")


def _number(target: str) -> int:
    return int(target.removeprefix("SM"))
