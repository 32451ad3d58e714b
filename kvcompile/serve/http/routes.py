"""What can be asked: completions, chat, models, health, metrics."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from kvcompile.errors import KVCompileError
from kvcompile.serve.http.answer import Job
from kvcompile.serve.http.errors import at_submit
from kvcompile.serve.http.prompts import of_chat, of_completion
from kvcompile.serve.http.reading import read
from kvcompile.serve.http.replies.chat import ChatReply
from kvcompile.serve.http.replies.completion import CompletionReply
from kvcompile.serve.http.schemas.chat import ChatRequest
from kvcompile.serve.http.schemas.completions import CompletionRequest
from kvcompile.serve.http.service import Service

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; a chat goes on while there is room


def _body(schema: type[BaseModel]) -> dict[str, Any]:
    """Of /openapi.json: what the body is like, which is read by hand for its limits and its errors."""
    described = schema.model_json_schema(ref_template="#/components/schemas/{model}")
    described.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}


def router(service: Service) -> APIRouter:
    """All routes of one server."""
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        asked = await read(request, CompletionRequest, service.limits)
        prompts = partial(of_completion, service, asked)
        job = Job(service, asked, CompletionReply, prompts, asked.logprobs, COMPLETION_TOKENS)
        return await job.answer(request)

    @routes.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat(request: Request) -> Response:
        asked = await read(request, ChatRequest, service.limits)
        prompts = partial(of_chat, service, asked)
        return await Job(service, asked, ChatReply, prompts, asked.likeliest, None).answer(request)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @routes.get("/health")
    async def health() -> Response:
        status = "stopping" if service.stopping else "ok"
        return JSONResponse({"status": status}, 503 if service.stopping else 200)

    @routes.get("/metrics")
    def metrics() -> Response:
        try:
            return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
        except KVCompileError as error:  # no replica is there to be asked
            raise at_submit(error) from error

    return routes


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvcompile",
        "max_model_len": service.engine.max_tokens,
    }
