"""Folders of the user's cache: $KVCOMPILE_CACHE_DIR, or kvcompile in $XDG_CACHE_HOME or ~/.cache.

What is only read as data may lie in any of them. What is imported as code must be nobody else's to write: a folder for
code is made with mode 0700, and refused where another user owns it, may write to it or may put another in its place.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kvcompile.errors import KernelError

KEEP = "KVCOMPILE_KEEP"
_OWNER_ONLY = 0o700
_POSIX = hasattr(os, "getuid")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """$KVCOMPILE_CACHE_DIR, or kvcompile in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("KVCOMPILE_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcompile"


def keeps() -> bool:
    """Whether results of one process are kept for the next: KVCOMPILE_KEEP=off keeps no proof and no program."""
    return os.environ.get(KEEP, "").lower() not in ("off", "0")


def make_cache_dir() -> Path:
    """`cache_dir`, which is there.

    Raises:
        OSError: it cannot be made.
    """
    folder = cache_dir()
    folder.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
    return folder


def code_folder(name: str) -> Path:
    """`name` in the cache, made if needed, to keep code in that is run: absolute, and only the user can write to it.

    Raises:
        KernelError: it cannot be made, or another user owns it, can write to it or can replace it.
    """
    folder = cache_dir().absolute() / name
    try:
        make_cache_dir()
        folder.mkdir(mode=_OWNER_ONLY, exist_ok=True)
        _check(folder.parent, {os.getuid(), 0} if _POSIX else set(), sticky=True)
        _check(folder, {os.getuid()} if _POSIX else set(), sticky=False)
    except OSError as error:
        raise KernelError(
            f"{folder}: the folder for generated code cannot be made ({error.strerror or error}): set "
            "KVCOMPILE_CACHE_DIR to a folder that you can write to"
        ) from error
    return folder


def write_atomically(path: Path, text: str) -> None:
    """`path` has all of `text` or what it had before, however many processes write it at once.

    Raises:
        OSError: the folder cannot be written to.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _check(folder: Path, owners: set[int], sticky: bool) -> None:
    """sticky: whether it is enough that what others put there cannot take the place of what the user has."""
    if not _POSIX:  # Windows: a profile's folders are its user's
        return
    found = folder.stat()
    if found.st_uid not in owners:
        raise KernelError(
            f"{folder}: belongs to user {found.st_uid}, not to you ({os.getuid()}), so code in it is not run: set "
            "KVCOMPILE_CACHE_DIR to a folder of your own"
        )
    if found.st_mode & _OTHERS_WRITE and not (sticky and found.st_mode & stat.S_ISVTX):
        raise KernelError(
            f"{folder}: others can write to it (mode {stat.S_IMODE(found.st_mode):04o}), so code in it is not run: "
            f"chmod go-w {folder}, or set KVCOMPILE_CACHE_DIR to another folder"
        )
