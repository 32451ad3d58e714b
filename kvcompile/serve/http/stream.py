"""Server-sent events: a `data:` line a chunk, and `[DONE]`; what fails once a stream has begun is an event, too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvcompile.serve.http.errors import Gone, Problem
from kvcompile.serve.http.gate import note_outcome
from kvcompile.serve.http.running import guarded
from kvcompile.serve.http.service import Service

logger = logging.getLogger(__name__)

_LAST_SECONDS = 2.0  # for the event that tells an error
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies would hold events back
]


class EventStream(Response):
    """A stream of chunks.

    Its status is sent with the first chunk, or once the request has waited for `Limits.ping_seconds`: what goes wrong
    before is an ordinary error.
    """

    def __init__(self, service: Service, chunks: AsyncGenerator[dict[str, Any], None]):
        super().__init__()
        self._service, self._chunks = service, chunks
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await guarded(self._service, receive, self._run(send))
        except Gone:
            note_outcome(scope, "cancelled")
            return
        except Exception as error:
            if not self._begun:
                raise
            if not isinstance(error, Problem):
                logger.exception("a stream failed")
                error = Problem(500, "internal error")
            note_outcome(scope, error.status)
            with suppress(TimeoutError):  # of a client that does not read; the connection is closed then
                async with asyncio.timeout(_LAST_SECONDS):
                    await self._write(send, b"data: " + to_json(error.body()) + b"\n\n", more=False)

    async def _run(self, send: Send) -> None:
        seconds = self._service.limits.ping_seconds
        async with aclosing(self._chunks) as chunks, aclosing(_pinged(chunks, seconds)) as events:
            async for event in events:
                await self._write(send, event)
        await self._write(send, b"data: [DONE]\n\n", more=False)

    async def _write(self, send: Send, event: bytes, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": event, "more_body": more})


async def _pinged(
    chunks: AsyncGenerator[dict[str, Any], None], seconds: float
) -> AsyncGenerator[bytes, None]:
    """Chunks as events, and a comment, which clients skip, after so many seconds without one."""
    while True:
        coming = asyncio.ensure_future(anext(chunks))
        try:
            while not (await asyncio.wait({coming}, timeout=seconds))[0]:
                yield b": waiting\n\n"
            chunk = coming.result()
        except StopAsyncIteration:
            return
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        yield b"data: " + to_json(chunk) + b"\n\n"
