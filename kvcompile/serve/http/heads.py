"""Requests whose head (the first line and the headers) has no end: refused before it has taken the server's memory.

uvicorn parses with h11, which has such a limit, or with httptools where that is installed, which has none. No key has
been looked at by then.
"""

from __future__ import annotations

import json
from typing import Any

from kvcompile.serve.http.errors import Problem

MOST = 64 << 10  # bytes; as h11 has it

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:
    PROTOCOL: Any = "h11"
else:

    class BoundedHeads(HttpToolsProtocol):
        """uvicorn's protocol over httptools, with a limit to heads."""

        _bytes: int | None = 0  # of the head that comes; None: it is there, and what comes is of its body

        def on_message_begin(self) -> None:
            self._bytes = -1  # what is of it in this piece is not known
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._bytes = None
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._bytes is None or self.transport.is_closing():
                return
            self._bytes = self._bytes + len(data) if self._bytes >= 0 else 0
            if self._bytes > MOST:
                problem = Problem(431, f"the request's first line and headers have more than {MOST} bytes")
                body = json.dumps(problem.body()).encode()
                head = (
                    "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                self.transport.write(head.encode() + body)
                self.transport.close()

    PROTOCOL = BoundedHeads
