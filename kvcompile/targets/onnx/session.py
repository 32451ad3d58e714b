"""`Session`: an ONNX artifact on ONNX Runtime.

Caches are bound where they stand (IOBinding), and updated in place where that can be. The graphs
of an artifact have one file of weights, which the operating system maps once.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import ArtifactError
from kvcompile.runtime import session
from kvcompile.targets.manifest import Graph

# ONNX's numbers of element types (onnx.TensorProto); ONNX Runtime binds by them what numpy has no name for.
_ELEMENT = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.bfloat16: 16,
}


class Session(session.Session):
    """An artifact for ONNX on ONNX Runtime; or one for TensorRT, by the graph that its engine was built of."""

    name = "ONNX Runtime"
    targets = ("onnx", "tensorrt")

    def __init__(
        self,
        path: str | Path,
        *,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        threads: int | None = None,
        check: bool = True,
    ):
        """
        path:      the artifact's folder
        providers: ONNX Runtime's execution providers, the first that can run a node does
        threads:   that a node may use; None: as many as there are cores
        check:     whether every file is compared with its sha256

        Raises:
            ArtifactError: no ONNX Runtime, no such provider; no artifact, a damaged one, or one for another target.
        """
        runtime = onnxruntime()
        if isinstance(providers, str) or not all(isinstance(name, str) for name in providers):
            raise ArtifactError(
                f"providers: expected a list of names such as ['CPUExecutionProvider'], got {providers!r}"
            )
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise ArtifactError(f"threads: expected a whole number of at least 1, or None, got {threads!r}")
        missing = [name for name in providers if name not in runtime.get_available_providers()]
        if missing:
            raise ArtifactError(
                f"providers: this ONNX Runtime has no {missing[0]}; it has "
                f"{', '.join(runtime.get_available_providers())}"
            )
        on_gpu = bool(providers) and providers[0] in ("CUDAExecutionProvider", "TensorrtExecutionProvider")
        super().__init__(path, device="cuda" if on_gpu else "cpu", check=check)
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        self._sessions: dict[str, Any] = {}
        for graph in self.manifest.graphs:
            try:
                self._sessions[graph.file] = runtime.InferenceSession(
                    str(self.path / self._file(graph)), options, providers=list(providers)
                )
            except Exception as error:  # ONNX Runtime has exceptions of its own, which derive from Exception
                reason = " ".join(str(error).split())[:600]
                raise ArtifactError(
                    f"{self.path / graph.file}: ONNX Runtime cannot load it: {reason}"
                ) from error

    @classmethod
    def may_fail(cls, dtype: str) -> bool:
        """ONNX Runtime is not installed, or has no kernels of the dtype."""
        return find_spec("onnxruntime") is None or dtype == "bfloat16"

    @staticmethod
    def _file(graph: Graph) -> str:
        """The graph's ONNX: what an engine was built of stands beside it."""
        return str(Path(graph.file).with_suffix(".onnx"))

    def _run(self, graph: Graph, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        running = self._sessions[graph.file]
        binding = running.io_binding()
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                bind(
                    name,
                    tensor.device.type,
                    tensor.device.index or 0,
                    _ELEMENT[tensor.dtype],
                    list(tensor.shape),
                    tensor.data_ptr(),
                )
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        running.run_with_iobinding(binding)
        if self.device.type == "cuda":
            binding.synchronize_outputs()


def onnxruntime() -> Any:
    """The module.

    Raises:
        ArtifactError: it is not installed.
    """
    try:
        import onnxruntime as module
    except ImportError as error:
        raise ArtifactError(
            "running an ONNX artifact needs ONNX Runtime: pip install onnxruntime (or onnxruntime-gpu)"
        ) from error
    return module
