"""A store in a folder, which outlives the engine: one safetensors file for each key.

| file | what |
|---|---|
| secret | 32 bytes that keys begin with and files are signed with, for its owner alone (mode 0600) |
| <hash of the key>.safetensors | "data", uint8; the metadata has the format and an HMAC-SHA256 over key and data |

A key begins with the secret, the plan, its scales, the weights and the code (`kvcompile/serve/identity.py`), and the
signature has the key in it: so a file of another plan, of other weights or under another name is not taken for this
one, nor is one that was damaged, cut off, or made by someone who does not know the secret. Such a file is told and
removed, and what was in it is computed again.

Files appear whole, under their name: they are written beside it first. Engines, also in other processes, may have one
folder together: a file that another one removed is not found, and one that both write has the same bytes. A thread
writes; what waits for it is found already. Where a disk is full or slow, what has no room is not kept.

Files that were not read or written for longest go first: their time of change says when that was.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kvcompile.errors import InputError
from kvcompile.serve.pages import Key
from kvcompile.serve.store import Item

log = logging.getLogger(__name__)

_FORMAT = "kvcompile page 1"
_SUFFIX, _PART = ".safetensors", ".part"
_SECRET = "secret"
_WAITING = 256 << 20  # bytes that wait to be written at most
_LEFT = 0.9  # of the room, after some files had to go
_STALE = 3600.0  # seconds after which a file that was not finished never will be


class Disk:
    """Items in the files of a folder."""

    def __init__(self, folder: str | Path, room: int):
        """
        room: bytes of all files at most

        Raises:
            InputError: it is no folder, cannot be written, or others may read its secret.
        """
        self.folder = Path(folder)
        self.secret = _secret(self.folder)
        self.closed = False
        self._room = room
        self._waiting: OrderedDict[Key, Item] = OrderedDict()
        self._bytes_waiting = 0
        self._changed = threading.Condition()
        self._told = False
        self.nbytes = 0
        self._make_room()
        self._thread: threading.Thread | None = (
            None  # from the first item on: an engine that is refused leaves none
        )

    # ---- what engines do

    def lookup(self, key: Key) -> bool:
        with self._changed:
            if key in self._waiting:
                return True
        return os.path.exists(self._path(key))  # unlike Path's, no error of the disk is ours

    def load(self, key: Key) -> Item | None:
        with self._changed:
            item = self._waiting.get(key)
        if item is not None:
            return item
        path = self._path(key)
        try:
            read = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read, and is not used: %s", path, error)
            return None
        try:
            data = self._checked(key, read)
        except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            log.warning("%s is not what was stored there, and is removed: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # it is needed still
            os.utime(path)
        return Item(data)

    def store(self, key: Key, item: Item) -> None:
        with self._changed:
            full = self._bytes_waiting + item.nbytes > _WAITING
            if self.closed or full or item.nbytes > self._room or key in self._waiting or not self._writes():
                return
            self._waiting[key] = item
            self._bytes_waiting += item.nbytes
            self._changed.notify_all()

    def _writes(self) -> bool:
        """Whether there is a thread that writes, which is started where there is none."""
        if self._thread is None:
            thread = threading.Thread(target=self._write_all, name="kvcompile store", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process has no more threads
                log.warning("%s: an item was not written: %s", self.folder, error)
                return False
            self._thread = thread
        return True

    def close(self) -> None:
        """Write what waits, and take no more."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def drain(self) -> None:
        """Wait until all that waits is written, or could not be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    # ---- the writing thread

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self.closed)
                if not self._waiting:
                    return
                key, item = next(iter(self._waiting.items()))
            try:
                self._write(key, item)
            except Exception as error:
                if not self._told:
                    log.warning(
                        "%s: an item was not written: %s; others may not be, either", self.folder, error
                    )
                self._told = True
            finally:
                with self._changed:
                    del self._waiting[key]
                    self._bytes_waiting -= item.nbytes
                    self._changed.notify_all()

    def _write(self, key: Key, item: Item) -> None:
        path = self._path(key)
        if path.exists():
            return
        data = item.wait()
        written = save({"data": data}, {"format": _FORMAT, "signature": self._signature(key, data)})
        if self.nbytes + len(written) > self._room:
            self._make_room(len(written))
        beside = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}{_PART}")
        try:
            beside.write_bytes(written)
            beside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        self.nbytes += len(written)

    def _make_room(self, wanted: int = 0) -> None:
        """Count the files, and remove the oldest while there is no room for `wanted` bytes more."""
        files: list[tuple[float, int, Path]] = []
        now = time.time()
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another engine has removed it
                of = path.stat()
                if path.suffix == _PART and now - of.st_mtime > _STALE:
                    path.unlink()
                elif path.suffix == _SUFFIX:
                    files.append((of.st_mtime, of.st_size, path))
        total = sum(size for _, size, _ in files)
        if total + wanted > self._room:
            for _, size, path in sorted(files):
                if total + wanted <= self._room * _LEFT:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size
        self.nbytes = total

    # ---- files

    def _path(self, key: Key) -> Path:
        # Who sees names learns no key: keys of what comes after follow from one.
        return self.folder / (hashlib.sha256(b"kvcompile file " + key).hexdigest()[:40] + _SUFFIX)

    def _signature(self, key: Key, data: torch.Tensor) -> str:
        signed = hmac.new(self.secret, _FORMAT.encode() + b"\0" + key, hashlib.sha256)
        signed.update(data.numpy().data)
        return signed.hexdigest()

    def _checked(self, key: Key, read: bytes) -> torch.Tensor:
        """The data of a file; ValueError and others where it is not what was stored."""
        data = load(read)["data"]
        size = int.from_bytes(read[:8], "little")
        told = json.loads(read[8 : 8 + size])["__metadata__"]
        if told["format"] != _FORMAT:
            raise ValueError(f"expected {_FORMAT}, got {told['format']!r}")
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(f"expected bytes, got {data.dtype} {tuple(data.shape)}")
        if not hmac.compare_digest(self._signature(key, data).encode(), str(told["signature"]).encode()):
            raise ValueError("its signature is not that of its bytes under this key")
        return data


def _secret(folder: Path) -> bytes:
    """The secret of a folder, which is made where there is none."""
    path = folder / _SECRET
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make_secret(path)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is not writable")
        mode, found = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise InputError(f"store: {folder} cannot be used: {error}") from error
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise InputError(
            f"store: others may read {path}, who could then make pages that are taken for ours: remove the folder, or "
            f"run chmod 600 {path} if it was never read"
        )
    if len(found) != 32:
        raise InputError(f"store: {path} is no secret of 32 bytes: remove the folder")
    return found


def _make_secret(path: Path) -> None:
    """Under its name it is whole from the start, and the first one stays."""
    beside = path.with_name(f"{_SECRET}.{os.getpid()}.{threading.get_ident()}{_PART}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):  # another engine was first
            os.link(beside, path)
    finally:
        beside.unlink()
