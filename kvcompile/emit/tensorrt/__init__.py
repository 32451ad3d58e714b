"""TensorRT: engines from ONNX files that were traced under `kernels.dialect.TENSORRT`."""

from kvcompile.emit.tensorrt.build import Built, build
from kvcompile.emit.tensorrt.options import Options
from kvcompile.emit.tensorrt.profiles import Sizes

__all__ = ["Built", "Options", "Sizes", "build"]
