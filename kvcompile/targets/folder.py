"""Writes an artifact's folder as a whole or not at all, and checks one against its manifest.

Everything is written to a folder beside the final one, and takes its name when it is complete. What stood there before
is an artifact, or empty, or is refused: nothing else is ever removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcompile.errors import ArtifactError, ExportError
from kvcompile.targets.manifest import FILE, FileInfo, Manifest
from kvcompile.util import whole_file


@contextmanager
def writing(out: str | Path) -> Iterator[Path]:
    """A new folder that becomes `out` when the block ends without an error; else it is gone and `out` is as it was.

    Raises:
        ExportError: `out` holds something that is no artifact, or cannot be written (no room, no rights).
    """
    final = place(out)
    check_replaceable(final)
    parents = _missing(final)
    try:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{final.name[:100]}-", dir=final.parent))
        except OSError as error:
            raise _unwritable(final, error, final.parent) from error
        try:
            yield made
            _give_rights(made)
            _replace(made, final)
        except OSError as error:
            raise _unwritable(final, error, made) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except BaseException:
        for parent in parents:
            with suppress(OSError):  # somebody else has put something there
                parent.rmdir()
        raise


def place(out: str | Path) -> Path:
    """Where `out` is: of a link, what it leads to, for a folder in the place of the link would leave that as it was.

    Raises:
        ExportError: nothing can be there.
    """
    try:
        return whole_file.place(out)
    except OSError as error:
        raise ExportError(f"{out!r}: expected the path of a folder: {error.strerror or error}") from error


def _missing(final: Path) -> list[Path]:
    """Folders that must be made for it to stand in, the innermost first."""
    return [parent for parent in final.parents if not parent.exists()]


def _unwritable(final: Path, error: OSError, where: Path) -> ExportError:
    """where: the folder that was written to"""
    reason = error.strerror or str(error)
    path = None if error.filename is None else Path(os.fsdecode(error.filename))
    if path is not None and path != where and where not in path.parents and path != final:
        reason = f"{path}: {reason}"  # what was read, or written to elsewhere on the way
    elif where == final.parent:
        reason = f"{reason}, in {where}, where a new folder is made that takes its name; choose a folder in another one"
    return ExportError(
        f"{final} cannot be written: {reason}. Nothing was left there; what it was before, it is still"
    )


def _give_rights(made: Path) -> None:
    """Let others read what was made as they may read other new files: passing folders and files are their owner's."""
    rights = whole_file.new_file_rights()
    readers = (rights & 0o444) >> 2  # who reads a folder may enter it
    for path in (made, *made.rglob("*")):
        path.chmod(rights | readers | 0o100 if path.is_dir() else rights | path.stat().st_mode & 0o777)


def check_replaceable(final: Path) -> None:
    """Refuse a place that holds what no export has written, or where none may write.

    Raises:
        ExportError: a file, a folder with something else in it, or one that stands in a file or in a folder of others.
    """
    try:
        _check_place(final)
    except OSError as error:  # a name that is too long, or a folder that may not be looked into
        raise ExportError(
            f"{final} cannot be looked at: {error.strerror or error}; choose another folder"
        ) from error


def _check_place(final: Path) -> None:
    """Raises ExportError, or OSError where it cannot be looked at."""
    if not final.exists():
        _check_stands_in(next(parent for parent in final.parents if parent.exists()), final)
        return
    _check_stands_in(final.parent, final)
    if not final.is_dir():
        raise ExportError(f"{final}: expected a folder, and it is a file; name another one")
    if any(final.iterdir()) and not (final / FILE).is_file():
        raise ExportError(
            f"{final} holds something that is no artifact (it has no {FILE}); name a new folder, or empty it"
        )
    if (final / FILE).is_file():
        written = _written(final / FILE)
        for path in sorted(final.rglob("*")):
            name = path.relative_to(final).as_posix()
            if (path.is_symlink() or not path.is_dir()) and name not in written:
                raise ExportError(
                    f"{final} holds {name!r}, which is not of the artifact there; move it, or name a new folder"
                )


def _check_stands_in(parent: Path, final: Path) -> None:
    """Raises ExportError where nothing new can be made in `parent`: better before the work than after it."""
    if not parent.is_dir():
        raise ExportError(f"{final} cannot be written: {parent} is a file; choose a folder in another one")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ExportError(
            f"{final} cannot be written: {parent}, where a new folder is made that takes its name, may not be written "
            "to; choose a folder in another one"
        )


def _written(manifest: Path) -> set[str]:
    """The files of an artifact, its manifest's among them: of whatever version it is.

    Raises:
        ExportError: it is not of kvcompile, or damaged.
    """
    try:
        data = json.loads(manifest.read_text(encoding="utf-8"))
        assert data["format"] == "kvcompile"
        return {FILE, *data["files"]}
    except (OSError, ValueError, LookupError, TypeError, AssertionError, RecursionError):
        raise ExportError(
            f"{manifest} is not of kvcompile, or damaged, so that nobody knows which files here are an artifact's; "
            "name a new folder, or delete this one"
        ) from None


def infos(folder: Path) -> dict[str, FileInfo]:
    """Size and sha256 of every file in `folder`, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): FileInfo(bytes=path.stat().st_size, sha256=sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILE
    }


def check(folder: str | Path, manifest: Manifest, *, contents: bool = True) -> None:
    """Every file is there and is what was written; without `contents`, has the size of what was written.

    Raises:
        ArtifactError: the first that is missing, truncated or damaged.
    """
    check_files(Path(folder), manifest.files, contents=contents)


def check_files(folder: Path, files: Mapping[str, FileInfo], *, contents: bool = True) -> None:
    """As `check`, of files by their path in the folder."""
    for name, info in files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(
                f"{path} is missing: the artifact is incomplete; copy all of it, or export again"
            )
        if path.stat().st_size != info.bytes:
            raise ArtifactError(
                f"{path}: expected {info.bytes:,} bytes, found {path.stat().st_size:,}: it is truncated or another "
                "file; copy it again, or export again"
            )
        if contents and sha256(path) != info.sha256:
            raise ArtifactError(
                f"{path}: its sha256 is not that of the manifest: it is damaged; export again"
            )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(made: Path, final: Path) -> None:
    if not final.exists():
        made.rename(final)
        return
    # A folder cannot be exchanged in one step everywhere: the old one moves aside and comes back if that fails.
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name[:100]}-old-", dir=final.parent))
    old = aside / final.name
    try:
        final.rename(old)
        made.rename(final)
    finally:
        if old.exists() and not final.exists():
            old.rename(final)
        # Not reached where the old one is in it and cannot come back.
        shutil.rmtree(aside, ignore_errors=True)
