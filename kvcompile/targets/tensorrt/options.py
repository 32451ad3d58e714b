"""What may be chosen of a TensorRT build."""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.errors import ExportError
from kvcompile.targets.tensorrt.adapter import TensorRT


@dataclass(frozen=True)
class Options:
    """
    compute_capabilities: GPUs to build for, as in ("SM86", "SM89"); (): what the package takes of itself, which is
        every supported GPU from Ampere on for TensorRT for RTX, and the GPU that is there for TensorRT
    workspace_bytes: the most that a tactic may take beside weights and activations; None: TensorRT's own choice
    """

    compute_capabilities: tuple[str, ...] = ()
    workspace_bytes: int | None = None

    def check(self, trt: TensorRT) -> None:
        """Refuse what this TensorRT cannot do.

        Raises:
            ExportError: an unknown target, or a choice of targets where there is none; a workspace below 1 byte.
        """
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise ExportError(f"workspace_bytes: expected at least 1, got {self.workspace_bytes}")
        if not self.compute_capabilities:
            return
        if not trt.targets:
            raise ExportError(
                f"compute_capabilities {', '.join(self.compute_capabilities)}: {trt.package} {trt.version} builds for "
                "the GPU that it runs on; leave them out and build there, or use TensorRT for RTX "
                "(pip install 'kvcompile[tensorrt]')"
            )
        unknown = [name for name in self.compute_capabilities if name not in trt.targets]
        if unknown:
            raise ExportError(
                f"compute_capabilities: {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not among those "
                f"that {trt.package} {trt.version} builds for: {', '.join(trt.targets)}. A data-centre GPU (SM90, "
                "SM100) needs the enterprise `tensorrt`, built on that GPU"
            )
        if len(set(self.compute_capabilities)) < len(self.compute_capabilities):
            raise ExportError("compute_capabilities: the same one twice")
