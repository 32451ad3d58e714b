"""A real server on a free port of loopback, in a thread."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from kvcompile.serve.http import Options, bind, create_app, serve, url
from kvcompile.serve.http.service import Service

# A client makes one of its own for each request, which takes longer than the request.
TRUSTED = ssl.create_default_context()


@dataclass
class Running:
    """`url` ends in /v1; `root` does not."""

    url: str
    service: Service
    thread: threading.Thread

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def client(self, **more: Any) -> openai.OpenAI:
        """The official client; it does not try again."""
        return openai.OpenAI(
            **{"base_url": self.url, "api_key": "none", "max_retries": 0, "timeout": 20} | more
        )

    def post(self, path: str, **more: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", timeout=20, verify=TRUSTED, **more)

    def metric(self, line: str) -> float:
        """The value of the line of /metrics that begins so."""
        text = httpx2.get(f"{self.root}/metrics", verify=TRUSTED).text
        (found,) = [one for one in text.splitlines() if one.startswith(f"{line} ")] or [f"{line} 0"]
        return float(found.rpartition(" ")[2])

    def until(self, what: Any, seconds: float = 10.0) -> bool:
        """Whether `what()` becomes true in time."""
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True


@contextmanager
def running(engine: Any, options: Options | None = None) -> Iterator[Running]:
    """Serve `engine`; at the end the server must stop by itself, whatever runs."""
    app, bound = create_app(engine, options), bind("127.0.0.1", 0)
    address = url(bound)
    thread = threading.Thread(target=serve, args=(app, bound), daemon=True)
    thread.start()
    try:
        yield Running(address, app.state.service, thread)
    finally:
        app.state.service.stop()
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
