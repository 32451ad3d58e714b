"""A file that is written as a whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def place(path: str | os.PathLike[str]) -> Path:
    """Where `path` is: with `~` as the user's folder, and of a link, what it leads to.

    Raises:
        OSError: nothing can be there: links that lead in circles, a name that no file can have, no path at all.
    """
    try:
        found = Path(path).expanduser().resolve()
    except (ValueError, RuntimeError, TypeError) as error:  # of Python's own checks
        raise OSError(errno.EINVAL, str(error)) from error
    # Python 3.13 leaves links that lead in circles as they are.
    if circle := next((part for part in (found, *found.parents) if part.is_symlink()), None):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(circle))
    return found


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new file, which takes the place of `path` when the block ends without an error; else it is gone.

    A file that a link leads to is replaced, and not the link. The new one has the rights of the one that it replaces,
    or those that any new file has.

    Raises:
        OSError: `path` is a folder, or something that is no file (a device, a pipe); or it cannot be written. What was
            there is as it was.
    """
    final = place(path)
    rights = _rights(final)
    handle, made = tempfile.mkstemp(prefix=f".{final.name[:100]}-", dir=final.parent)
    os.close(handle)
    try:
        yield Path(made)
        os.chmod(made, rights)
        os.replace(made, final)
    except BaseException:
        with suppress(OSError):
            os.unlink(made)
        raise


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file.

    Raises:
        OSError: as files do.
    """
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # that of its own kind: no room, no rights
        raise OSError(str(error)) from error


def _rights(final: Path) -> int:
    try:
        found = final.stat().st_mode
    except FileNotFoundError:
        return new_file_rights()
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(final))
    if not stat.S_ISREG(found):  # whoever may would replace /dev/null for all programs
        raise OSError(errno.EINVAL, "it is a device or a pipe, which no file takes the place of", str(final))
    return stat.S_IMODE(found)


def new_file_rights() -> int:
    """The rights that this process gives a new file; files with a passing name get fewer."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
