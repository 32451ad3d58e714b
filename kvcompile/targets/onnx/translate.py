"""ONNX for operators that PyTorch's exporter has no translation of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxscript
import torch

from kvcompile.kernels.reference.linear_write import OP
from kvcompile.targets.onnx import arithmetic


def translations(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Translations by operator, for `torch.onnx.export(custom_translation_table=...)`."""
    op: Any = onnxscript.values.Opset("", opset)

    def sort_stable(self: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        # TopK gives the lower index first where two are equal (its specification), and so is stable.
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]), axis=0)
        return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)

    def linear_write(buffer: Any, rows: Any, start: Any) -> Any:
        return op.TensorScatter(buffer, rows, start, axis=-2, mode="linear")  # opset 24

    return {
        **arithmetic.translations(opset),
        torch.ops.aten.sort.stable: sort_stable,
        OP: linear_write,
    }
