"""`kvcompile.load`: what a folder holds, a saved module or the session of an artifact."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcompile.errors import ArtifactError
from kvcompile.runtime.session import Session
from kvcompile.targets.manifest import FILE, Manifest
from kvcompile.targets.registry import TARGETS


def load(path: str | Path, **options: Any) -> Any:
    """Open what `fast.save` or `kvcompile.export` has written to the folder `path`.

    Of a saved module it is the optimized module, ready to be called; of an artifact its session.

    Args:
        options: check=False does not read every file to compare its sha256. Of a saved module, weights= gives those
            that it was saved without: the original, a state dict, or safetensors (a file, or a folder of them), which
            must be the same to the last byte. Of an artifact, those of its session.

    Raises:
        ArtifactError: nothing of the kind, damaged, of another version, or not for this machine.
    """
    try:
        folder = Path(path).expanduser()
    except (RuntimeError, TypeError) as error:  # a user whom nobody knows; no path at all
        raise ArtifactError(f"{path!r}: expected the path of a folder: {error}") from error
    if _target(folder) == "module":
        from kvcompile.runtime import saved_module

        _check_options(saved_module.load, options, f"{folder}, a saved module,")
        return saved_module.load(folder, **options)
    manifest = Manifest.read(folder)
    _, opened = next(openers(manifest))
    _check_options(opened, options, f"{folder}, an artifact for {manifest.target},")
    return opened(folder, **options)


def _check_options(opens: Callable[..., Any], options: dict[str, Any], what: str) -> None:
    """Raises ArtifactError where `opens` does not have one of the options."""
    known = [name for name, of in inspect.signature(opens).parameters.items() if of.kind == of.KEYWORD_ONLY]
    other = next((name for name in options if name not in known), None)
    if other is not None:
        raise ArtifactError(f"{what} is not opened with {other}=: it takes {', '.join(known)}")


def _target(folder: Path) -> Any:
    """What the manifest calls itself; None where it cannot be read, which `Manifest.read` tells in full."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data.get("target") if isinstance(data, dict) else None


def openers(manifest: Manifest) -> Iterator[tuple[str, type[Session]]]:
    """Sessions that an artifact can be run with, by name, its target's own first."""
    for kind in TARGETS[manifest.target].sessions:
        yield kind.name, kind.load()
