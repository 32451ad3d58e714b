"""A request's body: read within its limits, and checked against its schema."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from kvcompile.serve.http.errors import Gone, Problem, of_validation
from kvcompile.serve.http.options import Limits
from kvcompile.util.console import format_bytes

Schema = TypeVar("Schema", bound=BaseModel)


async def read(request: Request, schema: type[Schema], limits: Limits) -> Schema:
    """The body as its schema.

    Raises:
        Problem: 400, 408, 413 or 415.
        Gone: the client left before all of it was there.
    """
    _check_headers(request, limits)
    try:
        async with asyncio.timeout(limits.body_seconds):
            body = await _body(request, limits.body_bytes)
    except TimeoutError:
        raise Problem(
            408,
            f"the body was not there after {limits.body_seconds:g} seconds",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise Gone from None
    try:
        given = from_json(body)
    except ValueError as error:
        raise Problem(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise Problem(400, f"expected a JSON object, got {type(given).__name__}", code="invalid_json")
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise of_validation(error) from None


def _check_headers(request: Request, limits: Limits) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site cannot send this without asking first (CORS)
        raise Problem(415, f"expected the header Content-Type: application/json, got {kind[:100]!r}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Problem(415, f"bodies are not compressed here: got Content-Encoding: {encoding[:100]!r}")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > limits.body_bytes):
        raise _too_large(limits.body_bytes)


async def _body(request: Request, most: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(most: int) -> Problem:
    return Problem(
        413, f"the body has more than {format_bytes(most)}, the most here", headers={"Connection": "close"}
    )
