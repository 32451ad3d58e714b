"""One replica: an engine in a process of its own, which answers what a router sends it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvcompile.errors import BusyError, InputError, KVCompileError, LimitError, ServeError
from kvcompile.serve.http.service import ServedEngine
from kvcompile.serve.request import Delta, Handle, Result
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.stats import Stats
from kvcompile.serve.submitting import submitted

# Errors with a meaning of their own, which take a message and no more.
_SAID = (
    BusyError,
    InputError,
    LimitError,
)


@dataclass(frozen=True)
class Taken:
    """The engine has the request; deltas and the result follow."""


@dataclass(frozen=True)
class Refused:
    """The engine refused a request, or a step of it failed; kind: the class of `kvcompile.errors`."""

    kind: str
    message: str


@dataclass(frozen=True)
class About:
    """What the interface must know of the engine before any request; tokenizer: None: prompts are token ids."""

    name: str
    vocabulary: int
    max_tokens: int | None
    tokenizer: Any | None


Answer = Taken | Refused | Delta | Result


class OwnedEngine(ServedEngine, Protocol):
    """What a replica needs of `kvcompile.serve.Engine`."""

    @property
    def closed(self) -> bool: ...
    def close(self, drain: float = 0.0) -> None: ...


class Replica:
    """What Ray Serve makes a deployment of.

    It ends gracefully by Ray's own rule: one that is to go takes no new request, has `graceful_shutdown_timeout_s` for
    those that it has, and is closed then.
    """

    def __init__(self, make: Callable[[], OwnedEngine]):
        """make: gives an engine that has compiled what it needs; called in the replica's process."""
        self.engine = make()

    def about(self) -> About:
        engine = self.engine
        return About(engine.name, engine.vocabulary, engine.max_tokens, engine.tokenizer)

    async def answer(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        salt: str,
        id: str,
        beginnings: Sequence[str] = (),
    ) -> AsyncIterator[Answer]:
        """What a request gives, as it comes: `Taken`, deltas and a result; `Refused` where it ends otherwise.

        Errors are answers: what a replica raises, Ray logs as its own defect. A reader who leaves cancels the request.

        Args:
            beginnings: for the router alone.
        """

        def submit(handles: list[Handle]) -> None:
            handles.append(self.engine.submit(list(ids), sampling, salt=salt, id=id))

        try:
            async with submitted(submit) as (_, (handle,)):
                yield Taken()
                async for delta in handle:
                    yield delta
                yield handle.result()
        except KVCompileError as error:
            kind = next((kind for kind in _SAID if isinstance(error, kind)), ServeError)
            yield Refused(kind.__name__, str(error))

    def stats(self) -> Stats:
        return self.engine.stats()

    def check_health(self) -> None:
        """Called by Ray: a replica whose engine has ended is replaced."""
        if self.engine.closed:
            raise ServeError("the engine is closed")

    def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.close()
