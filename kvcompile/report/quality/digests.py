"""What a figure depends on, as short hashes: a finished measurement is taken again only where all are equal."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

import kvcompile
from kvcompile.original.digest import of_model

__all__ = ["of_model", "of_tokens", "short", "versions"]

# Decide no figure.
_SHOWN_ONLY = (
    "cli",
    "report/quality/table.py",
    "report/quality/plot.py",
    "report/quality/files.py",
)


def short(data: object) -> str:
    """A hash of anything JSON can hold."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def of_tokens(ids: Tensor) -> str:
    """Of token ids: text and tokenizer in one."""
    return hashlib.sha256(ids.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of what computes: released versions, and a hash of kvcompile's own code, which a checkout may change."""
    return {
        "kvcompile": kvcompile.__version__,
        "code": _of_code(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def _of_code() -> str:
    """Of the Python files of kvcompile that decide figures."""
    hashed = hashlib.sha256()
    home = Path(kvcompile.__file__).parent
    from kvcompile import kernels, passes

    for folder in (home, *(Path(str(p.__path__[0])) for p in (kernels, passes))):
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(folder).as_posix()
            if folder != home or not name.startswith(_SHOWN_ONLY):
                hashed.update(name.encode() + file.read_bytes())
    return hashed.hexdigest()[:16]
