"""A digest of kvcompile's own code: what is kept of its results is for this code alone."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from kvcompile.util.own_code import KVCOMPILE

_TEXTS = (".py", ".jinja", ".h", ".cpp", ".json")


@cache
def code_digest() -> str:
    """Of the files that kvcompile runs, imports and prints kernels from, as they lie on disk; about 20 ms, once."""
    hashed = hashlib.sha256()
    for folder in map(Path, KVCOMPILE):
        for file in sorted(path for path in folder.rglob("*") if path.suffix in _TEXTS):
            hashed.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return hashed.hexdigest()[:16]
