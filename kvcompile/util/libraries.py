"""Whether a compiled library is all there: a process that loads half of one ends at once (SIGBUS).

Files are put in their place whole, but a disk that lost its power, or was full, may have half of one or nothing.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # of 64 bits, least byte first
_HEADER = 64
_SECTIONS_AT, _SECTIONS = 0x28, 0x3A  # where the table of sections begins; the size of an entry, and how many


def is_whole(path: Path) -> bool:
    """Whether a library or an object is as long as its header says: the table of sections is the last there is."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEADER)
    except OSError:
        return False
    if not sys.platform.startswith("linux"):
        return size > 0
    if len(head) < _HEADER or not head.startswith(_MAGIC):
        return False
    (begin,) = struct.unpack_from("<Q", head, _SECTIONS_AT)
    each, count = struct.unpack_from("<HH", head, _SECTIONS)
    return bool(size >= begin + each * count > 0)
