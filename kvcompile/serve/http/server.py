"""A server that ends gracefully: new requests get 503, what runs may end within a limit, then all is closed."""

from __future__ import annotations

import logging
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kvcompile.errors import KVCompileError
from kvcompile.serve.http.heads import PROTOCOL
from kvcompile.serve.http.service import Service

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 5  # for answers to be sent once everything must end


class Server(uvicorn.Server):
    """uvicorn, which would close its socket at once where it is told to stop, so that new requests get no answer."""

    def __init__(self, app: FastAPI):
        self.service: Service = app.state.service
        self._deadline: float | None = None
        super().__init__(
            uvicorn.Config(
                app,
                http=PROTOCOL,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_CLOSING_SECONDS,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT or SIGTERM: the first one asks, the second one does not wait for what runs."""
        if self.service.stopping:
            self.should_exit = True
        self.service.stop()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; True: it is time to end."""
        stopping, running = self.service.stopping, self.service.running
        if stopping and self._deadline is None:
            self._deadline = time.monotonic() + self.service.limits.drain_seconds
            logger.info("stopping; %d requests run", running)
        late = self._deadline is not None and time.monotonic() > self._deadline
        if (stopping and not running) or late or self.should_exit:
            self.service.ended.set()
            return True
        return await super().on_tick(counter)


def bind(host: str, port: int) -> socket.socket:
    """A socket to serve on; port 0 is any free one.

    Raises:
        KVCompileError: there is no such address here, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise KVCompileError(f"cannot serve on {host}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(socket.SOMAXCONN)
    except OSError as error:
        bound.close()
        raise KVCompileError(f"cannot serve on {host} port {port}: {error}") from error
    return bound


def url(bound: socket.socket) -> str:
    """What clients call its base URL."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def serve(app: FastAPI, bound: socket.socket) -> None:
    """Serve until a signal (in the main thread) or `Service.stop` ends it, and return; the socket is closed."""
    with bound:
        Server(app).run(sockets=[bound])
