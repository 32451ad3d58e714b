"""`load`: the session of an artifact, whatever its target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcompile.artifact.manifest import Manifest, Target
from kvcompile.runtime.session import Session

# Imported when they are asked for: each needs a package of its own.
_ONNX = ("onnx", "kvcompile.runtime.onnx", "Session")
_SESSIONS: dict[Target, tuple[tuple[str, str, str], ...]] = {
    "onnx": (_ONNX,),
    "tensorrt": (("tensorrt", "kvcompile.runtime.tensorrt", "Engine"), _ONNX),
    "aoti": (("aoti", "kvcompile.runtime.aoti", "Package"),),
}


def load(path: str | Path, **options: Any) -> Session:
    """Open the artifact in the folder `path`; options: those of its session.

    Raises:
        ArtifactError: no artifact, a damaged one, or one that this machine cannot run.
    """
    manifest = Manifest.read(path)
    _, opened = next(openers(manifest))
    return opened(path, **options)


def openers(manifest: Manifest) -> Iterator[tuple[str, Callable[..., Session]]]:
    """Sessions that an artifact can be run with, by name, its target's own first."""
    for name, module, cls in _SESSIONS[manifest.target]:
        yield name, getattr(import_module(module), cls)
