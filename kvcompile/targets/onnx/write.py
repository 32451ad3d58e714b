"""Target onnx: prefill.onnx and decode.onnx with one file of weights, checked and run once.

Options: opset, 24 or (for older parsers) 23.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from kvcompile.errors import ExportError
from kvcompile.kernels.shared.dialect import ONNX
from kvcompile.targets.functional import Phase, functional
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.onnx.graph import OPSET, OPSETS, emit
from kvcompile.targets.onnx.weights import WeightFile
from kvcompile.targets.source import Source

WEIGHTS = "weights.bin"
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


def write(
    source: Source, folder: Path, options: dict[str, Any], tell: Callable[[str, int, int], None]
) -> Manifest:
    """Write the graphs to `folder`; see `kvcompile.export`.

    Raises:
        ExportError: an unknown option, or a graph that ONNX has no words for.
    """
    unknown = options.keys() - {"opset"}
    if unknown:
        raise ExportError(f"options: {min(unknown)!r} is not one of target onnx; it has: opset")
    opset = options.get("opset", OPSET)
    if opset not in OPSETS:
        raise ExportError(f"opset: expected one of {', '.join(map(str, OPSETS))}, got {opset!r}")
    function = functional(source.front, source.plan, ONNX)
    emitted = []
    with WeightFile(folder / WEIGHTS) as weights:
        for number, phase in enumerate(_PHASES):
            tell(f"export {phase}", number, len(_PHASES))
            emitted.append(emit(function, phase, folder, weights, source.metadata(), opset=opset))
    tell("check", len(_PHASES), len(_PHASES))
    for each in emitted:
        checked(folder / each.file)
    return source.manifest("onnx", function, tuple(emitted), ("onnx", "onnxscript"))


def checked(path: Path) -> None:
    """Refuse a file that is no valid ONNX.

    Raises:
        ExportError: what onnx.checker says of it.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # several kinds, of C++
        raise ExportError(f"{path.name} is not valid ONNX: {' '.join(str(error).split())[:600]}") from error
