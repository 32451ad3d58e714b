"""One server for tests that leave it as it is, and engines for those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from kvcompile.serve.http import Limits, Options
from tests.serve.http.fake_engine import FakeEngine, tiny_tokenizer
from tests.serve.http.running_server import Running, running

LIMITS = Limits(body_bytes=20_000, texts=8, completion_tokens=100, seconds=20, drain_seconds=5)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[FakeEngine]:
    made = FakeEngine(tokenizer)
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[Running]:
    with running(engine, Options(limits=LIMITS)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


@pytest.fixture
def serving() -> Iterator[Callable[..., Running]]:
    """serving(engine, options): a server of a test's own; it and the engine end with the test."""
    with ExitStack() as stack:

        def start(engine: FakeEngine, options: Options | None = None) -> Running:
            stack.callback(engine.close)
            return stack.enter_context(running(engine, options or Options(limits=LIMITS)))

        yield start
