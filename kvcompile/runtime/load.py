"""`load`: the session of an artifact, whatever its target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcompile.artifact.manifest import Manifest
from kvcompile.runtime.session import Session


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
    match manifest.target:
        case "onnx":
            from kvcompile.runtime import onnx

            yield "onnx", onnx.Session
        case "tensorrt":
            from kvcompile.runtime import onnx, tensorrt

            yield "tensorrt", tensorrt.Engine
            yield "onnx", onnx.Session
        case "aoti":
            from kvcompile.runtime import aoti

            yield "aoti", aoti.Package
