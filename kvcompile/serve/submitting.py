"""Requests that are submitted in a thread: tokenizers and grammars take their time, and other streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from kvcompile.serve.request import Handle

Found = TypeVar("Found")


@asynccontextmanager
async def submitted(
    submit: Callable[[list[Handle]], Found], threads: Executor | None = None
) -> AsyncIterator[tuple[Found, list[Handle]]]:
    """What `submit` gives, and the handles that it has put into its list, once an engine has taken all of them.

    What has not ended when this is left is cancelled, also where it is left while it is submitting.

    Args:
        threads: where `submit` runs; None: in threads of the event loop's.

    Raises:
        KVCompileError: as `Engine.submit`; and whatever else `submit` raises.
    """
    handles: list[Handle] = []
    work = asyncio.get_running_loop().run_in_executor(threads, submit, handles)
    try:
        found = await asyncio.shield(work)
        await asyncio.gather(*(handle.taken() for handle in handles))
        yield found, handles
    finally:
        work.add_done_callback(partial(_left, handles))


def _left(handles: Sequence[Handle], work: asyncio.Future[Found]) -> None:
    if not work.cancelled():
        work.exception()  # whoever would have been told has left: nobody needs to read of it
    for handle in handles:
        if not handle.done:
            handle.cancel()
