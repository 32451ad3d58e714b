"""From a checked request to what is sent: a whole answer, or the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcompile.serve.http.admission import admitted
from kvcompile.serve.http.prompts import Prompt
from kvcompile.serve.http.replies.reply import Reply
from kvcompile.serve.http.running import deltas, guarded
from kvcompile.serve.http.schemas.generation import Generation
from kvcompile.serve.http.service import Service
from kvcompile.serve.http.stream import EventStream


@dataclass(frozen=True)
class Job:
    """One request.

    kind:           of its answer
    prompts:        makes its prompts; called in a thread
    logprobs:       of `Sampling`
    default_tokens: where the request has no limit; None: as many as there is room for
    """

    service: Service
    asked: Generation
    kind: type[Reply]
    prompts: Callable[[], list[Prompt]]
    logprobs: int | None
    default_tokens: int | None

    async def answer(self, request: Request) -> Response:
        """Run it.

        Raises:
            Problem: it cannot be run, failed, or ended early; of a stream, before it began.
            Gone: the client left.
        """
        self.service.check_model(self.asked.model)
        if self.asked.stream:
            return EventStream(self.service, self._chunks())
        return JSONResponse(await guarded(self.service, request.receive, self._whole()))

    async def _whole(self) -> dict[str, Any]:
        began, id = time.monotonic(), self._id()
        clock = self.service.metrics.clock(began)
        async with admitted(self, id) as (found, handles), aclosing(deltas(handles, clock)) as coming:
            async for _ in coming:
                pass
            self.service.metrics.total.observe(time.monotonic() - began)
            return self._reply(id, found).whole([handle.result(0) for handle in handles])

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        began, id = time.monotonic(), self._id()
        clock = self.service.metrics.clock(began)
        async with admitted(self, id) as (found, handles), aclosing(deltas(handles, clock)) as coming:
            reply = self._reply(id, found)
            openings = reply.openings()
            async for place, delta in coming:
                for opening in openings:  # not before it runs: what fails until then is an ordinary error
                    yield opening
                openings = []
                if (chunk := reply.chunk(place, delta)) is not None:
                    yield chunk
            self.service.metrics.total.observe(time.monotonic() - began)
            if (last := reply.last([handle.result(0) for handle in handles])) is not None:
                yield last

    def _id(self) -> str:
        return f"{self.kind.ID}-{uuid.uuid4().hex}"

    def _reply(self, id: str, prompts: list[Prompt]) -> Reply:
        service = self.service
        return self.kind(id, int(time.time()), service.name, self.asked, prompts, service.tokens)
