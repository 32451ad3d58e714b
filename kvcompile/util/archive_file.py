"""A file that PyTorch may write an archive to: where a write fails in one, it ends the whole process.

Its writer throws once more from the destructor that follows the error (`PyTorchStreamWriter`, torch 2.11 to 2.14).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast


class _Patient(io.RawIOBase):
    """Takes every write; the first error is kept in `problem`, and what comes after it goes nowhere."""

    def __init__(self, file: io.BufferedWriter):
        super().__init__()
        self.problem: BaseException | None = None
        self._file = file

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any) -> int:
        if self.problem is None:
            try:
                self._file.write(data)
            except BaseException as error:  # an interruption as well
                self.problem = error
        return memoryview(data).nbytes


@contextmanager
def archive_file(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write an archive to, whose errors are raised once it has been written.

    Raises:
        OSError: as files do.
    """
    with path.open("wb") as file:
        patient = _Patient(file)
        yield cast("IO[bytes]", patient)
        if patient.problem is not None:
            raise patient.problem
