"""While a request runs: its tokens as they come, and every way in which it may end early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from kvcompile.errors import ServeError
from kvcompile.serve.http.errors import Gone, Problem, closed
from kvcompile.serve.http.gate import left
from kvcompile.serve.http.metrics import Clock
from kvcompile.serve.http.service import Service
from kvcompile.serve.request import Delta, Handle

Result = TypeVar("Result")


async def guarded(service: Service, receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled where its client leaves, its time is up, or the server must end.

    Raises:
        Gone: the client left.
        Problem: 504, 503, or what `work` raises.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(left(receive))
    ended = asyncio.ensure_future(service.ended.wait())
    try:
        done, _ = await asyncio.wait(
            {task, gone, ended}, timeout=service.limits.seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if task in done:
            return task.result()
        if gone in done:
            raise Gone
        if ended in done:
            raise closed()
        raise Problem(
            504, f"the request had not ended after {service.limits.seconds:g} seconds, and is cancelled"
        )
    finally:
        for one in (task, gone, ended):
            one.cancel()
        await asyncio.gather(task, gone, ended, return_exceptions=True)


async def deltas(handles: Sequence[Handle], clock: Clock) -> AsyncGenerator[tuple[int, Delta], None]:
    """What comes of all prompts, each with its place, in the order in which it comes.

    Raises:
        Problem: 500: a step failed; 503: the engine was closed.
    """
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def follow(place: int, handle: Handle) -> None:
        last: Exception | None = None
        try:
            async with aclosing(aiter(handle)) as coming:  # type: ignore[type-var]
                async for delta in coming:
                    clock.note(place, delta)
                    queue.put_nowait((place, delta))
        except Exception as error:
            last = error
        queue.put_nowait((place, last))

    tasks = [asyncio.ensure_future(follow(place, handle)) for place, handle in enumerate(handles)]
    try:
        open_ = len(tasks)
        while open_:
            place, item = await queue.get()
            if isinstance(item, Delta):
                yield place, item
            elif item is None:
                open_ -= 1
            elif isinstance(item, ServeError):
                raise Problem(500, str(item), code="engine_failed") from item
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
