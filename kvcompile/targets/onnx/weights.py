"""One file of weights for all graphs of an artifact: what several of them hold is written once.

ONNX keeps a model in one protobuf message, of at most 2 GiB; so everything but small constants goes to a file beside,
at offsets that are multiples of a page, from where runtimes can map it into memory.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType

import onnx_ir as ir

_INLINE = 1024  # bytes that stay in the graph
_ALIGNED = 4096


class WeightFile:
    """Writes initializers of any number of models to one file; used as a context."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("wb")
        self._places: dict[tuple[str, tuple[int, ...], bytes], tuple[int, int]] = {}

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def move(self, model: ir.Model) -> None:
        """Move the model's weights here: its initializers are then places in this file."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes <= _INLINE:
                continue
            shape = tuple(tensor.shape.numpy())
            data = tensor.tobytes()
            key = (str(tensor.dtype), shape, hashlib.sha256(data).digest())
            if key not in self._places:
                self._places[key] = (self._append(data), len(data))
            offset, length = self._places[key]
            value.const_value = ir.ExternalTensor(
                self.path.name,
                offset,
                length,
                tensor.dtype,
                shape=ir.Shape(shape),
                name=value.name or "",
                base_dir=self.path.parent,
            )

    def _append(self, data: bytes) -> int:
        start = -(-self._file.tell() // _ALIGNED) * _ALIGNED
        self._file.write(b"\0" * (start - self._file.tell()))
        self._file.write(data)
        return start
