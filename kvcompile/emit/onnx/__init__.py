"""ONNX: the rewritten graph as `.onnx` files with one file of weights."""

from kvcompile.emit.onnx.write import OPSET, OPSETS, emit

__all__ = ["OPSET", "OPSETS", "emit"]
