"""How requests end early: clients that leave, time that is up, and a server that is told to stop."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from multiprocessing.connection import Connection
from typing import Any

import httpx2
import openai
import pytest

from kvcompile.serve.http import Limits, Options, bind, create_app, serve, stream, url
from kvcompile.serve.http.service import Service
from tests.serve.http.fake_engine import FakeEngine, tiny_tokenizer
from tests.serve.http.running_server import TRUSTED, Running

TEXT: dict[str, Any] = {"model": "fake", "prompt": "w3", "max_tokens": 5}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(server: Running, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent, and nothing read."""
    raw = json.dumps(body).encode()
    made = socket.create_connection(("127.0.0.1", int(server.root.rpartition(":")[2])), timeout=10)
    made.sendall(HEAD + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return made


def outcome(server: Running, how: str) -> float:
    return server.metric(f'kvcompile_http_requests_total{{outcome="{how}",route="/v1/completions"}}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["w3", ["w3", "w4"]])
def test_a_client_that_leaves_cancels(serving: Callable[..., Running], stream: bool, prompt: Any) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine)
    engine.hold()  # nothing has come yet
    count = 1 if isinstance(prompt, str) else 2
    with connected(server, {**TEXT, "prompt": prompt, "stream": stream, "n": 2}):
        assert engine.wait_for(count)
    assert engine.wait_for(0), "the request went on without its client"
    assert len(engine.cancelled) == count
    assert server.until(lambda: outcome(server, "cancelled") == 1)
    assert server.until(lambda: server.service.running == 0)


def test_a_client_that_leaves_within_a_stream_cancels(serving: Callable[..., Running]) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine)
    other = server.client().completions.create(**TEXT, stream=True)
    with server.client().completions.create(**{**TEXT, "max_tokens": 90}, stream=True) as stream:
        next(stream)
        engine.hold()
    assert engine.wait_for(len(engine.seen) - 1 - engine.stats().finished)
    assert len(engine.cancelled) == 1 and engine.cancelled[0].startswith("cmpl-")
    engine.hold(False)
    assert len(list(other)) == 5  # the other one does not notice


def test_a_client_that_leaves_while_its_prompt_becomes_tokens(serving: Callable[..., Running]) -> None:
    """Its request comes to the engine after it has left, and is cancelled there."""
    tokenizer = tiny_tokenizer()
    engine = FakeEngine(tokenizer)
    server = serving(engine)
    busy, on = engine.slow_to_submit()
    engine.hold()
    with connected(server, TEXT):
        assert busy.wait(10)
    assert server.until(lambda: outcome(server, "cancelled") == 1)
    on.set()
    assert server.until(lambda: len(engine.cancelled) == 1)
    assert engine.wait_for(0)


@pytest.mark.parametrize("stream", [False, True])
def test_time_that_is_up(serving: Callable[..., Running], stream: bool) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine, Options(limits=Limits(seconds=0.2)))
    engine.hold()
    with pytest.raises(openai.InternalServerError, match=r"after 0\.2 seconds") as caught:
        server.client().completions.create(**TEXT, stream=stream)
    assert caught.value.status_code == 504 and caught.value.code == "timeout"
    assert engine.wait_for(0) and len(engine.cancelled) == 1
    assert server.until(lambda: outcome(server, "timed_out") == 1)


def test_time_that_is_up_within_a_stream(serving: Callable[..., Running]) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine, Options(limits=Limits(seconds=1.5)))
    stream = server.client().completions.create(**TEXT | {"max_tokens": 200}, stream=True)
    next(stream)
    engine.hold()
    with pytest.raises(openai.APIError, match=r"after 1\.5 seconds"):
        list(stream)
    assert engine.wait_for(0) and len(engine.cancelled) == 1
    assert server.until(lambda: outcome(server, "timed_out") == 1)


def test_a_body_that_does_not_come(serving: Callable[..., Running]) -> None:
    server = serving(FakeEngine(tiny_tokenizer()), Options(limits=Limits(body_seconds=0.2)))
    with socket.create_connection(("127.0.0.1", int(server.root.rpartition(":")[2])), timeout=10) as slow:
        slow.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        answer = b"".join(iter(lambda: slow.recv(4096), b""))  # until the server closes the connection
    assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer


def test_a_stream_that_waits_says_so(serving: Callable[..., Running]) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine, Options(limits=Limits(ping_seconds=0.05)))
    engine.hold()
    with httpx2.stream(
        "POST", f"{server.url}/completions", json={**TEXT, "stream": True}, timeout=10
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.iter_lines()
        assert next(lines) == ": waiting"
        engine.hold(False)
        told = [line for line in lines if line.startswith("data: ")]
    assert told[-1] == "data: [DONE]" and len(told) == 6
    engine.hold()
    stream = server.client().completions.create(**TEXT, stream=True)
    engine.fail_next = "too late for a status"
    engine.hold(False)
    with pytest.raises(openai.APIError, match="too late for a status"):
        list(stream)


def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up, too, and nobody waits for it to read that."""
    monkeypatch.setattr(stream, "_LAST_SECONDS", 0.1)
    left = []

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        try:
            while True:
                yield {}
        finally:
            left.append(True)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # as uvicorn, whose buffer is full

    async def main() -> None:
        engine = FakeEngine(tiny_tokenizer())
        service = Service(engine, Options(limits=Limits(seconds=0.1)))
        scope: Any = {"state": {}}
        await asyncio.wait_for(stream.EventStream(service, chunks())(scope, receive, send), 10)
        assert scope["state"]["outcome"] == "timed_out" and left
        engine.close()

    asyncio.run(main())


def test_what_runs_may_end_and_nothing_new_begins(serving: Callable[..., Running]) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine, Options(limits=Limits(drain_seconds=60)))
    stream = server.client().completions.create(**TEXT, stream=True)
    got = [next(stream)]
    engine.hold()
    server.service.stop()
    with pytest.raises(openai.InternalServerError, match="the server is stopping") as caught:
        server.client().completions.create(**TEXT)
    assert caught.value.status_code == 503 and caught.value.code == "closed"
    assert httpx2.get(f"{server.root}/health").status_code == 503
    time.sleep(0.5)  # longer than the server needs to look what runs
    assert server.thread.is_alive() and not engine.cancelled
    engine.hold(False)
    got += stream
    assert len(got) == 5 and got[-1].choices[0].finish_reason == "length"
    server.thread.join(10)
    assert not server.thread.is_alive() and not engine.cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_end_in_time_is_cancelled(serving: Callable[..., Running], stream: bool) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine, Options(limits=Limits(drain_seconds=0.2)))
    engine.hold()
    caught: list[Exception] = []

    def ask() -> None:
        try:
            server.client().completions.create(**TEXT, stream=stream)
        except openai.APIError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert engine.wait_for(1)
    server.service.stop()
    server.thread.join(10)
    asking.join(10)
    assert not server.thread.is_alive() and len(engine.cancelled) == 1
    assert isinstance(caught[0], openai.InternalServerError) and caught[0].status_code == 503


def answered(root: str) -> int | None:
    try:
        return httpx2.get(f"{root}/health", verify=TRUSTED).status_code
    except httpx2.TransportError:
        return None


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def served(to: Connection) -> None:
    """A server in a process of its own: tells its address, and once it has ended what was cancelled."""
    engine, bound = FakeEngine(tiny_tokenizer()), bind("127.0.0.1", 0)
    to.send(url(bound))
    engine.hold()
    serve(create_app(engine, Options(limits=Limits(drain_seconds=60))), bound)
    to.send(f"cancelled {len(engine.cancelled)}")


@pytest.mark.parametrize(("number", "again"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_signals(number: signal.Signals, again: bool) -> None:
    """The first one asks and lets what runs end, the second one does not wait; the process ends well."""
    forks = multiprocessing.get_context("fork")  # which have what is imported here
    told, to = forks.Pipe(duplex=False)
    process = forks.Process(target=served, args=(to,))
    process.start()
    to.close()
    try:
        address = told.recv()
        root = address.removesuffix("/v1")
        until(lambda: answered(root) == 200)
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(
                httpx2.post(f"{address}/completions", json=TEXT, timeout=60).status_code
            )
        )
        if again:
            asking.start()
            until(
                lambda: "kvcompile_requests_running 1.0" in httpx2.get(f"{root}/metrics", verify=TRUSTED).text
            )
        os.kill(process.pid or 0, number)
        if again:
            until(lambda: answered(root) == 503)
            os.kill(process.pid or 0, number)
            asking.join(20)
            assert answers == [503]
        process.join(20)
        assert process.exitcode == 0
        assert told.recv() == f"cancelled {int(again)}"
    finally:
        process.kill()
        process.join()
