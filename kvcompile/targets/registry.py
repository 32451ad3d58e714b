"""The export targets, listed once: what writes each, and what can run what was written.

To add a target, add its line to `TARGETS`: nothing else knows the names.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

Target = str  # a key of TARGETS


@dataclass(frozen=True)
class SessionKind:
    """A way to run an artifact: its name, and the class that opens one, a `Session`.

    The module is imported when it is asked for: it may need a package that is not installed.
    """

    name: str
    module: str
    of: str

    def load(self) -> Any:
        return getattr(import_module(self.module), self.of)


@dataclass(frozen=True)
class ExportTarget:
    """One target.

    writer:   the module with `write(source, folder, options, progress) -> Manifest`, and `ready(options)` where there
              is something to check before the model is looked at
    sessions: what runs its artifacts, its own first
    generated: whether its graphs may run generated kernels; else sites are the reference's PyTorch
    """

    writer: str
    sessions: tuple[SessionKind, ...]
    generated: bool = False


_ONNX = SessionKind("onnx", "kvcompile.targets.onnx.session", "Session")
TARGETS: dict[Target, ExportTarget] = {
    "onnx": ExportTarget("kvcompile.targets.onnx.write", (_ONNX,)),
    "tensorrt": ExportTarget(
        "kvcompile.targets.tensorrt.write",
        (SessionKind("tensorrt", "kvcompile.targets.tensorrt.session", "Engine"), _ONNX),
    ),
    "aoti": ExportTarget(
        "kvcompile.targets.aoti.write",
        (SessionKind("aoti", "kvcompile.targets.aoti.session", "Package"),),
        generated=True,
    ),
}
