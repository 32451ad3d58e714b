"""`Package`: an AOTInductor package that runs. All that it needs is PyTorch: no model, no compiler, no Triton.

The graphs share one copy of the weights, which on a CPU stays in its file, mapped into memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvcompile.errors import ArtifactError
from kvcompile.runtime import session
from kvcompile.targets import machine
from kvcompile.targets.manifest import Graph, Manifest

WEIGHTS = "weights.safetensors"


class Package(session.Session):
    """An artifact of target "aoti"."""

    name = "AOTInductor"
    targets = ("aoti",)

    def __init__(self, path: str | Path, *, check: bool = True):
        """
        path:  the artifact's folder
        check: whether every file is compared with its sha256

        Raises:
            ArtifactError: no artifact, a damaged one, or one for another target, PyTorch or machine.
        """
        path = Path(path).expanduser()
        manifest = Manifest.read(path)
        needed = manifest.machine or {}
        if manifest.target in self.targets:
            _check_torch(path, manifest)
            problem = machine.problem(needed)
            if problem is not None:
                raise ArtifactError(f"{path}: {problem}")
        super().__init__(path, device=needed.get("device", "cpu"), check=check)
        weights = self._weights()
        self._models = {
            graph.entry: self._loaded(self.path / graph.file, graph.entry, weights)
            for graph in self.manifest.graphs
            if graph.entry is not None
        }

    def _weights(self) -> dict[str, Tensor]:
        try:
            return load_file(self.path / WEIGHTS, device=str(self.device))
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{self.path / WEIGHTS} cannot be read: {error}; export again") from error

    def _loaded(self, file: Path, entry: str, weights: dict[str, Tensor]) -> Any:
        """One graph of the package, and its constants where `weights` has them."""
        try:
            model: Any = torch._C._aoti.AOTIModelPackageLoader(str(file), entry, False, 1, -1)
            names = model.get_constant_fqns()
            own = {name: weights.get(f"{entry}/{name}", weights.get(name)) for name in names}
            missing = sorted(name for name, tensor in own.items() if tensor is None)
            if missing:
                raise ArtifactError(f"{self.path / WEIGHTS} has no {missing[0]!r}; export again")
            # user_managed: the graph reads these very tensors, which must live as long as it does.
            model.load_constants(own, False, True, True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:400]
            raise ArtifactError(f"{file}: PyTorch cannot load {entry!r}: {reason}; export again") from error
        return model, own

    def _run(self, graph: Graph, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        assert graph.entry is not None
        model, _ = self._models[graph.entry]
        (logits,) = model.boxed_run([inputs[info.name] for info in graph.inputs])
        outputs["logits"].copy_(logits)


def _check_torch(path: Path, manifest: Manifest) -> None:
    """Compiled code calls PyTorch's library by its inner names, which change from version to version."""
    made, here = manifest.versions.get("torch", "unknown"), torch.__version__
    if made.split("+")[0] != here.split("+")[0]:
        raise ArtifactError(
            f"{path}: an AOTInductor package of PyTorch {made}, and this is {here}: packages run on the version that "
            f"made them; pip install torch=={made.split('+')[0]}, or export again with {here.split('+')[0]}"
        )
