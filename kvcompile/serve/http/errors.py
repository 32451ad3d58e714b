"""Everything that goes wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvcompile.errors import BusyError, InputError, KVCompileError, LimitError, ServeError
from kvcompile.util.console import shown

# status -> (type, code) where nothing more exact is known
_KINDS = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "unknown_host"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "body_timeout"),
    413: ("invalid_request_error", "body_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    431: ("invalid_request_error", "headers_too_large"),
    429: ("rate_limit_error", "queue_full"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "closed"),
    504: ("server_error", "timeout"),
}
_MOST_PROBLEMS = 10


class Problem(Exception):
    """A request that ends with an error: its status and what its body says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.status = status
        self.param = param
        self.kind, known = _KINDS.get(status, _KINDS[400] if status < 500 else _KINDS[500])
        self.code = code or known
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", "1")
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """What is sent, as JSON or as an event of a stream."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class FieldError(ValueError):
    """A check of a whole body that knows which field is wrong."""

    def __init__(self, param: str, message: str, code: str = "invalid_value"):
        self.param, self.code = param, code
        super().__init__(message)


class Gone(Exception):
    """The client has closed the connection: nobody is there to be answered."""


def closed() -> Problem:
    return Problem(503, "the server is stopping; send the request to another one, or later")


def of_validation(error: ValidationError, names: Mapping[str, str] | None = None) -> Problem:
    """All that is wrong with a request's fields, in one message.

    names: what the request calls a field that its schema calls something else
    """
    found: dict[str, list[str]] = {}
    codes = []
    for problem in error.errors(include_url=False):
        place = [str(part) for part in problem["loc"]]
        ours = problem.get("ctx", {}).get("error")
        if isinstance(ours, FieldError):
            place.append(ours.param)
        codes.append(ours.code if isinstance(ours, FieldError) else "invalid_value")
        if place and names:
            place[0] = names.get(place[0], place[0])
        found.setdefault(".".join(place), []).append(_said(problem))
    lines = [f"{where}: {'; '.join(said)}" if where else "; ".join(said) for where, said in found.items()]
    if len(lines) > _MOST_PROBLEMS:
        lines = [*lines[:_MOST_PROBLEMS], f"and {len(lines) - _MOST_PROBLEMS} more"]
    return Problem(400, "; ".join(lines), param=next(iter(found)) or None, code=codes[0])


def _said(problem: Any) -> str:
    if problem["type"] == "missing":
        return "is required"
    if problem["type"] == "extra_forbidden":
        return "is not a field that this server knows"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":  # ours: complete as it is
        return str(message)
    return f"{message[:1].lower()}{message[1:]}, got {shown(problem['input'])}"


def at_submit(error: KVCompileError) -> Problem:
    """What the engine says of a request before it takes it."""
    if isinstance(error, BusyError):
        return Problem(429, str(error))
    if isinstance(error, ServeError):
        return Problem(503, str(error))
    if isinstance(error, LimitError):
        return Problem(400, str(error), param="max_tokens", code="context_length_exceeded")
    if isinstance(error, InputError):
        return Problem(400, str(error), code="invalid_value")
    return Problem(500, str(error))
