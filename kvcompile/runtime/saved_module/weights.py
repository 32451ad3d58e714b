"""The weights of a saved module: what stands in the place of the original model, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from kvcompile.errors import ArtifactError, ModelError
from kvcompile.runtime.module import CachedModel


class SavedWeights(nn.Module):
    """The original's parameters and saved buffers under their names, without its Python."""

    def __init__(self, architecture: str, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]):
        super().__init__()
        self.architecture = architecture
        for name, tensor in parameters.items():
            home, key = self._home(name)
            home.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        for name, tensor in buffers.items():
            home, key = self._home(name)
            home.register_buffer(key, tensor)
        self.config: Any = None
        self.generation_config: Any = None
        self.name_or_path = ""
        self.saved_as: tuple[str, str] | None = (
            None  # digests of weights and of weights and config, when it was saved
        )
        self.train(False)

    def named(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def _home(self, name: str) -> tuple[nn.Module, str]:
        home: nn.Module = self
        *path, key = name.split(".")
        for part in path:
            if part not in home._modules:
                home.add_module(part, nn.Module())
            home = home._modules[part]  # type: ignore[assignment]
        return home, key

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(self.missing("call it"))

    def missing(self, what: str) -> str:
        return (
            f"a saved module has the weights of {self.architecture} and the compiled graph, not the original's Python; "
            f"load the original to {what}"
        )

    # What an optimized model of transformers asks of its original.

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        if exclude_embeddings:
            raise ModelError(self.missing("tell its embeddings apart"))
        return 0 if only_trainable else sum(parameter.numel() for parameter in self.parameters())

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the weights, and of the saved buffers."""
        buffers = sum(b.nbytes for b in self.buffers()) if return_buffers else 0
        return sum(p.nbytes for p in self.parameters()) + buffers

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise ModelError(self.missing("write its checkpoint"))

    def get_input_embeddings(self) -> None:
        raise ModelError(self.missing("have its embeddings"))

    def get_output_embeddings(self) -> None:
        raise ModelError(self.missing("have its head"))


_ALIGNED = 64  # bytes, as PyTorch allocates


def tensors_of(file: Path) -> dict[str, Tensor]:
    """All of a safetensors file, each where vectors of the machine begin.

    A file has them where they fall, which some matrix products round otherwise for, and are slower with.
    """
    found = load_file(file)
    return {name: t.clone() if t.data_ptr() % _ALIGNED else t for name, t in found.items()}


def given(weights: Any) -> dict[str, Tensor]:
    """Weights by name, of what a user passes: a module, a mapping, a safetensors file, or a folder of some.

    Raises:
        ArtifactError: nothing of that kind, or it cannot be read.
    """
    if isinstance(weights, CachedModel):  # another one of the same original
        weights = weights.model
    if isinstance(weights, nn.Module):
        buffers = dict(weights.named_buffers())
        return _whole({**buffers, **dict(weights.named_parameters(remove_duplicate=False))})
    if isinstance(weights, Mapping):
        return _whole(weights)
    if not isinstance(weights, (str, Path)):
        raise ArtifactError(
            "weights: expected a module, a mapping of tensors by name, a safetensors file or a folder of some, got "
            f"{type(weights).__name__}"
        )
    path = Path(weights).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ArtifactError(f"weights: {path} holds no safetensors file")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= tensors_of(file)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"weights: {file} cannot be read: {error}") from error
    return found


def _whole(named: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same; raises ArtifactError where one is no tensor with numbers in it."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            got = "one without numbers (meta)" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArtifactError(f"weights: {name!r}: expected a tensor of torch, got {got}")
    return dict(named)
