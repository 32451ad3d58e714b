"""Many replicas as one engine: what the HTTP server calls instead of an `Engine`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)

from kvcompile import errors
from kvcompile.errors import BusyError, KVCompileError, ServeError
from kvcompile.serve.prompts import ids_of
from kvcompile.serve.replicas.affinity import beginnings
from kvcompile.serve.replicas.replica import About, Refused, Taken
from kvcompile.serve.request import Delta, Handle, Result
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.stats import Stats

log = logging.getLogger(__name__)

_GONE = (RayActorError, ReplicaUnavailableError)  # the replica, not the request
_TRIES = 3  # replicas that a request may lose before it has begun
_STATS_SECONDS = 2.0


class RemoteEngine:
    """Sends each request to a replica, and fills its handle with what comes back.

    A request whose replica is gone before any of its tokens came goes to another one, as if it had just come. One that
    has begun fails with a ServeError: its reader has seen tokens that another replica may not choose.
    """

    def __init__(self, replicas: Any, about: About):
        """
        Args:
            replicas: Ray's handle of a deployment of `Replica`.
            about: what one of them says of its engine.

        Made in the event loop in which answers are read.
        """
        self.name, self.vocabulary, self.max_tokens = about.name, about.vocabulary, about.max_tokens
        self.tokenizer = about.tokenizer
        self._replicas = replicas
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        salt: str = "",
        id: str | None = None,
    ) -> Handle:
        """As `Engine.submit`, and what the replica's engine says of the request is said by `Handle.taken`.

        Nobody waits for a replica here: one that does not answer would keep a thread from all other requests.

        Raises:
            InputError: no prompt, or ids that the model does not have.
        """
        ids = list(ids_of(prompt, self.tokenizer, (0, self.vocabulary - 1)))
        name = id if id is not None else f"request-{next(self._numbers)}"
        task: Future[None]

        def cancel() -> None:
            task.cancel()

        handle = RemoteHandle(name, cancel)
        request = {"salt": salt, "beginnings": beginnings(ids, salt)}
        follow = self._follow(handle, ids, sampling or Sampling(), request)
        task = asyncio.run_coroutine_threadsafe(follow, self._loop)
        return handle

    async def _follow(
        self, handle: RemoteHandle, ids: list[int], sampling: Sampling, request: dict[str, Any]
    ) -> None:
        """Read answers until the request has ended."""
        try:
            for number in range(1, _TRIES + 1):
                reader = _Reader(handle)
                # A replica that was out of reach may still have the request by the name of the first try.
                name = handle.id if number == 1 else f"{handle.id}, try {number}"
                try:
                    await reader.read(self._replicas, ids, sampling, {**request, "id": name})
                    return
                except _GONE as error:
                    if reader.begun or number == _TRIES:
                        raise ServeError(
                            "the replica that answered this request is gone: send it again"
                        ) from error
                    log.warning("request %s goes to another replica: %s", handle.id, error)
        except asyncio.CancelledError:
            handle.fail(ServeError("the request was cancelled"))
            raise
        except BackPressureError as error:
            handle.fail(BusyError(str(error)))
        except DeploymentUnavailableError as error:
            handle.fail(ServeError(f"no replica is there: {error}"))
        except KVCompileError as error:
            handle.fail(error)
        except RayError as error:
            handle.fail(ServeError(f"{type(error).__name__}: {error}"))
        except Exception as error:  # a defect of ours: nobody may wait for ever
            log.exception("request %s", handle.id)
            handle.fail(ServeError(f"{type(error).__name__}: {error}"))

    def stats(self) -> Stats:
        """Of all replicas that answer in time, together; numbers are sums. Not for the event loop's thread.

        Raises:
            ServeError: none does.
        """
        answers = self._replicas.broadcast("stats")
        try:
            found = answers.results(timeout_s=_STATS_SECONDS, return_exceptions=True)
        except (TimeoutError, RayServeException) as error:
            raise ServeError(f"no replica is there: {error}") from error
        there = [one for one in found if isinstance(one, Stats)]
        for other in (one for one in found if not isinstance(one, Stats)):
            log.warning("a replica says nothing of itself: %s: %s", type(other).__name__, other)
        if not there:
            raise ServeError("no replica says anything of itself")
        return together(there)


class RemoteHandle(Handle):
    """A request on its way to a replica, which takes it or says why not."""

    def __init__(self, id: str, cancel: Callable[[], None]):
        super().__init__(id, cancel)
        self._taken: Future[None] = Future()

    async def taken(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._taken))

    def take(self) -> None:
        """A replica has it."""
        if not self._taken.done():
            self._taken.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self._taken.done():
            self._taken.set_exception(error)
        super().fail(error)


class _Reader:
    """Of what one replica answers to one request."""

    def __init__(self, handle: RemoteHandle):
        self.begun = False
        self._handle = handle

    async def read(self, replicas: Any, ids: list[int], sampling: Sampling, request: dict[str, Any]) -> None:
        answers = replicas.options(method_name="answer", stream=True).remote(ids, sampling, **request)
        try:
            async for answer in answers:
                match answer:
                    case Taken():
                        self._handle.take()
                    case Delta():
                        self.begun = True
                        self._handle.put(answer)
                    case Result():
                        self._handle.finish(answer)
                        return
                    case Refused(kind, message):
                        raise getattr(errors, kind, ServeError)(message)
            raise ServeError("the replica ended this request without a result")
        except asyncio.CancelledError:
            answers.cancel()
            raise


def together(found: Sequence[Stats]) -> Stats:
    """The sums of what several engines say; words are those of the first, where all say the same."""
    if not found:
        return Stats()
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Stats):
        each = [getattr(one, field.name) for one in found]
        values[field.name] = " / ".join(dict.fromkeys(each)) if isinstance(each[0], str) else sum(each)
    return Stats(**values)
