"""The application: routes behind the gate, and every error in one shape."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from kvcompile.serve.http.errors import Gone, Problem
from kvcompile.serve.http.gate import Gate, answered, note_outcome
from kvcompile.serve.http.options import Options
from kvcompile.serve.http.routes import router
from kvcompile.serve.http.service import ServedEngine, Service

logger = logging.getLogger(__name__)


def create_app(engine: ServedEngine, options: Options | None = None) -> FastAPI:
    """An ASGI application that serves `engine`, which it does not close. `app.state.service` is its state.

    A server that runs it must end it by `Service.stop` for a graceful end; `serve` of `server.py` does.
    """
    service = Service(engine, options or Options())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.threads.shutdown(wait=False, cancel_futures=True)

    # /docs and /redoc would load scripts from elsewhere
    app = FastAPI(title="kvcompile", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.include_router(router(service))
    app.add_middleware(Gate, service=service)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(Gone, _gone)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)
    return app


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return answered(error)


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    note_outcome(request.scope, "cancelled")
    return Response(status_code=499)


async def _http(request: Request, error: Exception) -> Response:
    """Of routes that do not exist, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return answered(Problem(error.status_code, message, headers=error.headers))


async def _unexpected(request: Request, error: Exception) -> Response:
    """A defect; its traceback is in the log, and none of it in the answer."""
    return answered(Problem(500, "internal error; the server's log has more"))
