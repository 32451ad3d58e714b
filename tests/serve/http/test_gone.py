"""Clients that leave between two looks of the server: it hears of that where it writes, or where nobody waits."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from kvcompile.serve.http import Limits, Options, create_app
from tests.serve.http.fake_engine import FakeEngine, tiny_tokenizer

TEXT: dict[str, Any] = {"model": "fake", "prompt": "w3", "max_tokens": 5}
SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
}
UVLOOP = "unable to perform operation on <TCPTransport closed=True reading=False 0x7f>; the handler is closed"


def asked(engine: FakeEngine, stream: bool, after: int, error: Exception) -> tuple[str, int]:
    """Of a connection that is closed after so many messages: how it was counted, and what was sent after that."""
    app = create_app(engine, Options(limits=Limits(seconds=10), hosts=None))
    sent: list[Any] = []

    async def main() -> None:
        body: list[bytes] = [json.dumps({**TEXT, "stream": stream}).encode()]
        closed = asyncio.Event()

        async def receive() -> Any:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > after:
                asyncio.get_running_loop().call_soon(closed.set)
                raise error

        await asyncio.wait_for(app({**SCOPE, "state": {}}, receive, send), 10)

    asyncio.run(main())
    counted = app.state.service.metrics.text().decode().splitlines()
    (line,) = [one for one in counted if one.startswith("kvcompile_http_requests_total{")]
    return line.partition('outcome="')[2].partition('"')[0], len(sent) - after - 1


@pytest.mark.parametrize(("stream", "after"), [(True, 0), (True, 1), (True, 3), (False, 0), (False, 1)])
def test_a_connection_that_is_closed_under_an_answer(stream: bool, after: int) -> None:
    """uvloop raises where it is written to before uvicorn knows that it is closed: no defect of ours, and no answer."""
    engine = FakeEngine(tiny_tokenizer())
    outcome, more = asked(engine, stream, after, RuntimeError(UVLOOP))
    assert outcome == "cancelled" and more <= 1
    assert engine.wait_for(0)
    engine.close()


def test_a_defect_is_no_client_that_left() -> None:
    engine = FakeEngine(tiny_tokenizer())
    with pytest.raises(RuntimeError, match="Unexpected ASGI message"):
        asked(engine, False, 0, RuntimeError("Unexpected ASGI message"))
    engine.close()


def test_nobody_reads_that_the_queue_is_full(caplog: pytest.LogCaptureFixture) -> None:
    """The client has left while its prompt became tokens."""
    caplog.set_level(logging.ERROR)
    engine = FakeEngine(tiny_tokenizer(), max_queue=0)
    busy, on = engine.slow_to_submit()
    app = create_app(engine, Options(hosts=None))

    async def main() -> None:
        body = [json.dumps(TEXT).encode()]

        async def receive() -> Any:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await asyncio.to_thread(busy.wait, 10)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            assert message.get("status", 499) == 499

        await asyncio.wait_for(app({**SCOPE, "state": {}}, receive, send), 10)
        on.set()
        await asyncio.to_thread(app.state.service.threads.shutdown)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not caplog.records
    engine.close()
