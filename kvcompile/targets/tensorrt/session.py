"""`Engine`: a TensorRT artifact on the GPU.

Caches that the engine updates in place (its KVCacheUpdate layers) have one address for input and output, and keep it;
every other cache has two places, which swap after each call (`runtime/session.py`). Each optimization profile has an
execution context of its own, so that going from prefill to decode changes nothing in either; addresses and shapes are
told to a context only when they have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcompile.errors import ArtifactError, LimitError
from kvcompile.runtime import session
from kvcompile.targets.manifest import Graph, Manifest, Profile
from kvcompile.targets.tensorrt import engine as tensorrt_engine
from kvcompile.targets.tensorrt.adapter import TensorRT


class Device(Protocol):
    """What the engine needs of the GPU."""

    @property
    def capability(self) -> str | None: ...

    def stream(self) -> Any: ...  # a context manager that gives the handle of the stream to run on


@dataclass
class _Context:
    """One profile's execution context, and what it has been told."""

    made: Any
    profile: Profile
    addresses: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Engine(session.Session):
    """An artifact of target "tensorrt"."""

    name = "TensorRT"
    targets = ("tensorrt",)

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device | str = "cuda",
        check: bool = True,
        trt: TensorRT | None = None,
        gpu: Device | None = None,
    ):
        """
        path:  the artifact's folder
        check: whether every file is compared with its sha256
        trt:   the TensorRT to run on; None: the installed one that built the artifact
        gpu:   where it runs; None: `device`

        Raises:
            ArtifactError: no artifact, a damaged one or one for another target; no TensorRT that runs it, or another
                GPU. No memory of the GPU has been taken then.
        """
        manifest = Manifest.read(path)
        self._gpu = gpu if gpu is not None else Cuda(torch.device(device))
        if manifest.target in self.targets:  # else the base class says so
            self._trt = trt or tensorrt_engine.installed(manifest, Path(path))
            problem = tensorrt_engine.mismatch(manifest, self._trt)
            if problem is not None:
                raise ArtifactError(f"{path}: {self._trt.package} {problem}; export again")
            tensorrt_engine.check_gpu(manifest, self._gpu.capability, self._trt, Path(path))
        # It takes tensors of the device, and so comes after what that may lack.
        super().__init__(path, device=device, check=check)
        self._errors: list[str] = []
        self._logger = self._trt.logger(self._errors)
        self._runtime = self._trt.module.Runtime(self._logger)
        self._engines: dict[str, Any] = {}
        for graph in self.manifest.graphs:
            file = self.path / graph.file
            engine = tensorrt_engine.deserialize(self._trt, self._runtime, file, self._errors)
            tensorrt_engine.check_engine(engine, graph, file)
            self._engines[graph.file] = engine
        self._contexts: dict[tuple[str, str], _Context] = {}

    @classmethod
    def may_fail(cls, dtype: str) -> bool:
        """There is no GPU that the engine is for."""
        return True

    def _run(self, graph: Graph, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        profile = profile_for(graph, inputs)
        with self._gpu.stream() as stream:
            context = self._context(graph, profile, stream)
            for name, tensor in inputs.items():
                self._tell(context, name, tensor)
                shape = tuple(tensor.shape)
                if name in profile.shapes and context.shapes.get(name) != shape:
                    if not context.made.set_input_shape(name, shape):
                        raise self._failed(f"shape {list(shape)} of {name}")
                    context.shapes[name] = shape
            for name, tensor in outputs.items():
                self._tell(context, name, tensor)
            if not context.made.execute_async_v3(stream):
                raise self._failed("the call")

    def _tell(self, context: _Context, name: str, tensor: Tensor) -> None:
        address = tensor.data_ptr()
        if context.addresses.get(name) == address:
            return
        if not context.made.set_tensor_address(name, address):
            raise self._failed(f"the address of {name}")
        context.addresses[name] = address

    def _context(self, graph: Graph, profile: Profile, stream: Any) -> _Context:
        key = (graph.file, profile.name)
        if key not in self._contexts:
            made = self._engines[graph.file].create_execution_context()
            if made is None:
                raise self._failed("memory for another execution context")
            number = graph.profiles.index(profile)
            if not made.set_optimization_profile_async(number, stream):
                raise self._failed(f"the profile {profile.name}")
            self._contexts[key] = _Context(made, profile)
        return self._contexts[key]

    def _failed(self, what: str) -> ArtifactError:
        reason = " ".join((self._errors or ["no reason given"])[-1].split())
        return ArtifactError(f"{self.path}: TensorRT refused {what}: {reason}")


class Cuda:
    """An NVIDIA GPU of PyTorch."""

    def __init__(self, device: torch.device):
        self._device = device
        self._own: torch.cuda.Stream | None = None

    @property
    def capability(self) -> str | None:
        if self._device.type != "cuda" or not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability(self._device)
        return f"SM{major}{minor}"

    @contextmanager
    def stream(self) -> Iterator[int]:
        """PyTorch's stream, or one beside where that is the default one, on which TensorRT waits for the whole GPU."""
        current = torch.cuda.current_stream(self._device)
        if current.cuda_stream != 0:
            yield current.cuda_stream
            return
        self._own = self._own or torch.cuda.Stream(self._device)
        self._own.wait_stream(current)
        yield self._own.cuda_stream
        # What PyTorch does next, it does after; so memory that is freed meanwhile is not taken too early.
        current.wait_stream(self._own)


def profile_for(graph: Graph, inputs: dict[str, Tensor]) -> Profile:
    """The first of a graph's profiles that admits the shapes of a call.

    Raises:
        LimitError: none does.
    """
    problem = "it has no profiles"
    for profile in graph.profiles:
        outside = next(
            (
                (name, span)
                for name, span in profile.shapes.items()
                if not _within(tuple(inputs[name].shape), span.min, span.max)
            ),
            None,
        )
        if outside is None:
            return profile
        name, span = outside
        problem = (
            f"{name}: {list(inputs[name].shape)} is outside {list(span.min)} to {list(span.max)} of the profile "
            f"{profile.name}"
        )
    raise LimitError(
        f"the engine was not built for these shapes: {problem}; raise runtime.max_batch, max_tokens or prefill_chunk "
        "in the recipe and export again, or pass less"
    )


def _within(shape: tuple[int, ...], least: tuple[int, ...], most: tuple[int, ...]) -> bool:
    return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))


__all__ = ["Cuda", "Device", "Engine", "profile_for"]
