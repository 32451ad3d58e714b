"""What stands before every route: host, key, whether the server is stopping, and the count of how requests end."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcompile.serve.http.errors import Gone, Problem, closed
from kvcompile.serve.http.service import Service
from kvcompile.util.console import shown

log = logging.getLogger(__name__)

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/openapi.json")
_CLOSED = "the handler is closed"  # says uvloop where a client has left, before uvicorn knows of it
_LAST_SECONDS = 1.0
_OUTCOMES = {401: "unauthorized", 403: "unauthorized", 429: "busy", 503: "closed", 504: "timed_out"}


def answered(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.body(), problem.status, problem.headers)


def note_outcome(scope: MutableMapping[str, Any], how: str | int) -> None:
    """How a request ended where its status does not tell it: "cancelled", or the status that it would have had."""
    scope["state"]["outcome"] = how if isinstance(how, str) else _outcome(how)


def _outcome(status: int) -> str:
    if status < 400:
        return "ok"
    return _OUTCOMES.get(status, "refused" if status < 500 else "failed")


class Gate:
    """ASGI middleware. /health takes no key: those who only ask whether a server lives have none."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        scope.setdefault("state", {})["outcome"] = None

        gone = False

        async def noted(message: Message) -> None:
            nonlocal status, gone
            if message["type"] == "http.response.start":
                status = message["status"]
            try:
                await send(message)
            except RuntimeError as error:
                gone = gone or _CLOSED in str(error)
                if gone:
                    raise Gone from error
                raise

        self._service.running += 1
        try:
            problem = self._problem(scope)
            app = self._app if problem is None else answered(problem)
            await app(scope, receive, noted)
        except Exception as error:
            if not gone:
                raise
            log.debug("what became of an answer whose client has left: %r", error)
        finally:
            if gone:
                scope["state"]["outcome"] = "cancelled"
                # Until uvicorn knows it, too: else it misses the rest of the answer.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_SECONDS):
                        await left(receive)
            self._service.running -= 1
            route = scope["path"] if scope["path"] in ROUTES else "other"
            self._service.metrics.requests.labels(route, scope["state"]["outcome"] or _outcome(status)).inc()

    def _problem(self, scope: Scope) -> Problem | None:
        headers, options = Headers(scope=scope), self._service.options
        if options.hosts is not None and _name(headers.get("host", "")) not in options.hosts:
            host = shown(headers.get("host"))
            return Problem(
                403, f"this server does not go by the host name {host}; it takes {', '.join(options.hosts)}"
            )
        if options.api_key is not None and scope["path"] != "/health":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not _same(key.strip(), options.api_key):
                which = "a wrong" if key else "no"
                return Problem(
                    401,
                    f"{which} API key: expected the header Authorization: Bearer KEY",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if self._service.stopping and scope["path"].startswith("/v1/"):
            return closed()
        return None


async def left(receive: Receive) -> None:
    """Wait until the client has closed the connection; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _same(given: str, key: str) -> bool:
    """Whether two texts are equal, in a time that tells nothing of where they differ."""
    return hmac.compare_digest(given.encode("latin-1", "replace"), key.encode())


def _name(host: str) -> str:
    """The host without its port: "[::1]:8000" is "::1"."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
