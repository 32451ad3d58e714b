"""What is said where a module that was to be compiled for steps of one token stays in Python."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcompile.compile.inductor import ShapeClass

if TYPE_CHECKING:
    from kvcompile.runtime.module import CachedModel


def tell_of_steps(module: CachedModel, shapes: ShapeClass) -> None:
    """Warn once for each such module of a class of shapes, and let `explain` say it."""
    for path, why in module.executor.told.pop(shapes, {}).items():
        line = f"{path} stays in Python ({shapes}): {why}"
        warnings.warn(line, stacklevel=2)
        if module.analysis is not None:
            module.analysis = replace(module.analysis, reasons=(*module.analysis.reasons, line))
