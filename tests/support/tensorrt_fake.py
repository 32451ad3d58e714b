"""A TensorRT whose engines run on the CPU: execution contexts as strict as the real ones, and ONNX Runtime inside.

What a context is told (profile, shapes, addresses) is what it runs with: the ONNX graph that an engine was built from
gets exactly these addresses. So a wrong binding gives wrong numbers, and a forbidden one an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import tensorrt_rtx_bindings as real

from kvcompile.targets.manifest import Graph, Manifest
from kvcompile.targets.tensorrt.adapter import TensorRT

_ELEMENT = {"float32": 1, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10}
STREAM = 7


class Gpu:
    """The device of an `Engine` that runs on this."""

    def __init__(self, capability: str | None = "SM89"):
        self.capability = capability

    @contextmanager
    def stream(self) -> Iterator[int]:
        yield STREAM


class Context:
    def __init__(self, engine: FakeEngine):
        self.engine, self.profile = engine, None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.told: Counter[str] = Counter()

    def set_optimization_profile_async(self, number: int, stream: int) -> bool:
        assert stream == STREAM
        self.profile = self.engine.graph.profiles[number]
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        span = self.profile.shapes[name]
        if not all(a <= b <= c for a, b, c in zip(span.min, shape, span.max, strict=True)):
            return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.told[name] += 1
        assert address % 64 == 0, f"{name} is a view into another tensor"  # allocations start so, here
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == STREAM
        graph, sizes = self.engine.graph, {}
        assert set(self.addresses) == {t.name for t in (*graph.inputs, *graph.outputs)}
        for tensor in graph.inputs:
            shape = self.shapes.get(tensor.name, tensor.shape)
            for said, size in zip(tensor.shape, shape, strict=True):
                if isinstance(said, str):
                    assert sizes.setdefault(said, size) == size, f"{said} is both {sizes[said]} and {size}"
        taken = {self.addresses[t.name] for t in graph.inputs}
        for output in graph.outputs:
            own = self.engine.get_aliased_input_tensor(output.name)
            if own:
                assert self.addresses[output.name] == self.addresses[own], f"{output.name} is not in place"
            else:
                assert self.addresses[output.name] not in taken, f"{output.name} overwrites an input"
        binding = self.engine.running.io_binding()
        for bind, tensors in ((binding.bind_input, graph.inputs), (binding.bind_output, graph.outputs)):
            for tensor in tensors:
                shape = [sizes[size] if isinstance(size, str) else size for size in tensor.shape]
                bind(tensor.name, "cpu", 0, _ELEMENT[tensor.dtype], shape, self.addresses[tensor.name])
        self.engine.running.run_with_iobinding(binding)
        return True


class FakeEngine:
    def __init__(self, folder: Path, graph: Graph):
        self.graph, self.contexts = graph, list[Context]()
        file = folder / graph.file.replace(".engine", ".onnx")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.running = onnxruntime.InferenceSession(str(file), options)
        self.names = [t.name for t in (*graph.inputs, *graph.outputs)]
        # What KVCacheUpdate is made of; not what the manifest says.
        nodes = onnx.load(file, load_external_data=False).graph.node
        self.aliases = {n.output[0]: n.input[0] for n in nodes if n.op_type == "TensorScatter"}
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), len(graph.profiles)

    def get_tensor_name(self, number: int) -> str:
        return self.names[number]

    def get_aliased_input_tensor(self, name: str) -> str:
        return self.aliases.get(name, "")

    def create_execution_context(self) -> Context:
        self.contexts.append(Context(self))
        return self.contexts[-1]


class Fake:
    """`trt` and `gpu` for an `Engine` of the artifact in `folder`; `engines`: those that were loaded."""

    def __init__(self, folder: Path, version: str | None = None):
        self.engines: list[FakeEngine] = []
        self.gpu = Gpu()
        manifest = Manifest.read(folder)
        files = {(folder / graph.file).read_bytes(): graph for graph in manifest.graphs}

        def deserialize(blob: bytes) -> FakeEngine | None:
            if blob not in files:
                return None
            self.engines.append(FakeEngine(folder, files[blob]))
            return self.engines[-1]

        module = SimpleNamespace(
            ILogger=real.ILogger,
            IBuilderConfig=real.IBuilderConfig,
            ComputeCapability=real.ComputeCapability,
            Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=deserialize),
        )
        told: dict[str, Any] = manifest.engine or {}
        self.trt = TensorRT(module, "tensorrt_rtx_bindings", version or told["version"])
