"""What all requests of one server share: the engine, the options, the metrics, and whether it is stopping."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcompile.serve.http.errors import Problem
from kvcompile.serve.http.metrics import Metrics
from kvcompile.serve.http.options import Limits, Options
from kvcompile.serve.http.tokens import TokenTexts
from kvcompile.serve.request import Handle
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.stats import Stats
from kvcompile.util.console import shown


class ServedEngine(Protocol):
    """What the server needs of `kvcompile.serve.Engine`."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any | None: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def max_tokens(self) -> int | None: ...
    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        salt: str = "",
        id: str | None = None,
    ) -> Handle: ...
    def stats(self) -> Stats: ...


@dataclass
class Service:
    """One server's state; made before its event loop, and used in it.

    running:  requests that are being answered now
    stopping: nothing new is taken; set by `stop`
    ended:    what runs must end now
    threads:  for what takes long beside the loop: making tokens of a text, compiling a grammar
    encoding: held while the tokenizer makes tokens
    """

    engine: ServedEngine
    options: Options
    metrics: Metrics = field(init=False)
    tokens: TokenTexts = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    running: int = 0
    stopping: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="kvcompile-http")
    )
    encoding: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine.stats)
        self.tokens = TokenTexts(self.engine.tokenizer)

    @property
    def name(self) -> str:
        return self.options.name or self.engine.name

    @property
    def limits(self) -> Limits:
        return self.options.limits

    def stop(self) -> None:
        """Take nothing new; safe in a signal handler."""
        self.stopping = True

    def check_model(self, name: str) -> None:
        """Refuse any model but the one that is served.

        Raises:
            Problem: 404.
        """
        if name != self.name:
            raise Problem(
                404,
                f"model: there is no model {shown(name)} here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )
