"""Replicas as one engine: what hangs, dies or refuses costs its own requests; on stand-ins for Ray's handles."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvcompile.errors import BusyError, InputError, LimitError, ServeError
from kvcompile.serve import Sampling, Stats
from kvcompile.serve.http import Limits, Options, create_app
from kvcompile.serve.request import Delta, Result
from tests.serve.http.fake_engine import FakeEngine, tiny_tokenizer

ray = pytest.importorskip("ray")
from ray.exceptions import ActorDiedError  # noqa: E402 (with Ray alone)
from ray.serve.exceptions import DeploymentUnavailableError  # noqa: E402

from kvcompile.serve.replicas.remote import RemoteEngine  # noqa: E402
from kvcompile.serve.replicas.replica import About, Refused, Replica, Taken  # noqa: E402

PROMPT = [5, 6, 7]


class Handles:
    """Ray's handle of a deployment: every request is answered by the next of some replicas.

    named: ids by which replicas had requests
    """

    def __init__(self, *replicas: Callable[..., AsyncIterator[Any]]):
        self._replicas, self.named = list(replicas), list[str]()
        self.stats: list[Any] = []

    def options(self, method_name: str, stream: bool) -> Any:
        assert (method_name, stream) == ("answer", True)
        return self

    def remote(self, ids: list[int], sampling: Sampling, **request: Any) -> Any:
        self.named.append(request["id"])
        replica = self._replicas[0] if len(self._replicas) == 1 else self._replicas.pop(0)
        return Answers(replica(ids, sampling, **request))

    def broadcast(self, what: str) -> Any:
        assert what == "stats"

        def results(timeout_s: float, return_exceptions: bool = False) -> list[Any]:
            for one in self.stats:
                if isinstance(one, DeploymentUnavailableError) or not (
                    isinstance(one, Stats) or return_exceptions
                ):
                    raise one
            return self.stats

        return SimpleNamespace(results=results)


class Answers:
    """Ray's response that streams."""

    def __init__(self, answers: AsyncIterator[Any]):
        self._answers = answers

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._answers

    def cancel(self) -> None:
        """Nobody reads any more."""


async def hangs(*_: Any, **__: Any) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield Taken()


async def dies(*_: Any, **__: Any) -> AsyncIterator[Any]:
    for answer in ():
        yield answer
    raise ActorDiedError()


async def dies_late(*_: Any, **__: Any) -> AsyncIterator[Any]:
    yield Taken()
    yield Delta(0, (9,), "w9")
    raise ActorDiedError()


def refuses(kind: str) -> Callable[..., AsyncIterator[Any]]:
    async def answer(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield Refused(kind, "for a reason")

    return answer


@asynccontextmanager
async def replica(engine: FakeEngine | None = None) -> AsyncIterator[Replica]:
    made = engine or FakeEngine(tiny_tokenizer())
    yield Replica(lambda: made)
    await asyncio.to_thread(made.close)


def remote(handles: Handles) -> RemoteEngine:
    """Of an event loop that runs."""
    return RemoteEngine(handles, About("fake", FakeEngine.vocabulary, 256, tiny_tokenizer()))


async def answered(handles: Handles, prompt: list[int] = PROMPT) -> Result:
    handle = remote(handles).submit(prompt, Sampling(max_tokens=5), id="one")
    await asyncio.wait_for(handle.taken(), 10)
    return await asyncio.wait_for(handle.wait(), 10)


def test_replicas_that_hang_do_not_keep_others_requests() -> None:
    """More requests than there are threads wait for replicas that do not answer; another is answered meanwhile."""

    async def main() -> None:
        async with replica() as good:
            handles = Handles(*[hangs] * 12, good.answer)
            app = create_app(remote(handles), Options(hosts=None, limits=Limits(seconds=20)))
            gone = asyncio.Event()
            waiting = [asyncio.ensure_future(asked(app, gone)) for _ in range(12)]
            while len(handles.named) < 12:
                await asyncio.sleep(0.001)
            assert (await asyncio.wait_for(asked(app, asyncio.Event()), 10))[0] == 200
            gone.set()  # who has left is cancelled, wherever the request is
            assert [status for status, _ in await asyncio.wait_for(asyncio.gather(*waiting), 10)] == [
                499
            ] * 12

    asyncio.run(main())


async def asked(
    app: Any, gone: asyncio.Event, method: str = "POST", path: str = "/v1/completions"
) -> tuple[int, bytes]:
    """Status and body of a request whose client leaves when it is told to."""
    body = [json.dumps({"model": "fake", "prompt": PROMPT, "max_tokens": 5}).encode()]
    sent: list[Any] = []

    async def receive() -> Any:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers}
    await app({**scope, "query_string": b"", "state": {}}, receive, send)
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:])


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [("BusyError", BusyError, 429), ("LimitError", LimitError, 400), ("InputError", InputError, 400)],
)
def test_what_a_replica_refuses_is_refused(kind: str, error: type[Exception], status: int) -> None:
    async def main() -> None:
        with pytest.raises(error, match="for a reason"):
            await answered(Handles(refuses(kind)))
        app = create_app(remote(Handles(refuses(kind))), Options(hosts=None))
        found, body = await asked(app, asyncio.Event())
        assert found == status and b"for a reason" in body

    asyncio.run(main())


def test_a_request_that_had_not_begun_goes_to_another_replica() -> None:
    """By another name: where the first one lives after all, it may still have it."""

    async def main() -> None:
        async with replica() as good:
            handles = Handles(dies, dies, good.answer)
            assert len((await answered(handles)).tokens) == 5
            assert len(set(handles.named)) == 3 and handles.named[0] == "one"
            with pytest.raises(ServeError, match="is gone: send it again"):
                await answered(Handles(dies_late, good.answer))
            with pytest.raises(ServeError, match="is gone: send it again"):
                await answered(Handles(dies))

    asyncio.run(main())


def test_a_replica_says_what_its_engine_refuses() -> None:
    async def said(engine: FakeEngine, ids: list[int], sampling: Sampling) -> Refused:
        async with replica(engine) as one:
            (answer,) = [answer async for answer in one.answer(ids, sampling, salt="", id="a")]
            assert isinstance(answer, Refused)
            return answer

    async def main() -> None:
        tokenizer = tiny_tokenizer()
        greedy = Sampling()
        assert (await said(FakeEngine(tokenizer, max_queue=0), PROMPT, greedy)).kind == "BusyError"
        assert (await said(FakeEngine(tokenizer), [5] * 220, greedy)).kind == "LimitError"
        closed = FakeEngine(tokenizer)
        closed.close()
        assert (await said(closed, PROMPT, greedy)).kind == "ServeError"

    asyncio.run(main())


def test_a_grammar_that_takes_its_time_holds_up_nobody_elses_tokens() -> None:
    """And whoever leaves meanwhile has its request cancelled once the engine has it."""

    async def main() -> None:
        engine = FakeEngine(tiny_tokenizer())
        async with replica(engine) as one:
            first = one.answer(PROMPT, Sampling(max_tokens=5), salt="", id="first")
            assert isinstance(await anext(first), Taken)
            busy, on = engine.slow_to_submit()
            slow = one.answer(PROMPT, Sampling(max_tokens=200, n=4), salt="", id="slow")
            coming = asyncio.ensure_future(anext(slow))
            assert await asyncio.to_thread(busy.wait, 10)
            assert isinstance([answer async for answer in first][-1], Result)
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            engine.hold()
            on.set()
            assert await asyncio.to_thread(until, lambda: engine.cancelled == ["slow"])

    asyncio.run(main())


def until(there: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if there():
            return True
        threading.Event().wait(0.01)
    return there()


def test_numbers_are_of_the_replicas_that_answer() -> None:
    async def main() -> None:
        handles = Handles(hangs)
        engine = remote(handles)
        handles.stats = [Stats(running=2, pages=40), TimeoutError("no answer"), Stats(running=1, pages=40)]
        assert engine.stats() == Stats(running=3, pages=80)
        for nobody in ([TimeoutError("no answer")], [DeploymentUnavailableError(SimpleNamespace(name="x"))]):
            handles.stats = nobody
            with pytest.raises(ServeError, match="no replica"):
                engine.stats()
        found, body = await asked(create_app(engine, Options(hosts=None)), asyncio.Event(), "GET", "/metrics")
        assert found == 503 and b"no replica" in body

    asyncio.run(main())
