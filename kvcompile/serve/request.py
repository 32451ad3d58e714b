"""What a request gives back: tokens as they come, a result at the end, and a handle to wait for both.

A handle belongs to whoever submitted the request; the engine's thread fills it, any thread reads it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from kvcompile.errors import ServeError

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability before penalties and temperature, and the likeliest ones (token, log-probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """What one step adds to one text of a request.

    index:  of the text, below `Sampling.n`
    tokens: ids that came; none where only held-back text comes out
    text:   what can be shown by now; "" where the engine has no tokenizer, or a character is not complete
    finish: why the text has ended; None: it goes on
    """

    index: int
    tokens: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True)
class Usage:
    """What a request took.

    cached_tokens: of the prompt that came out of the prefix cache, when it was first admitted
    preemptions:   how often it lost its place; recomputed_tokens, swapped_bytes: what that cost
    queued:        seconds until its first chunk; first_token, total: seconds since it was submitted
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_bytes: int = 0
    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Completion:
    """One whole text; a stop string is no part of `text`, its tokens are of `tokens`."""

    index: int
    tokens: tuple[int, ...]
    text: str
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Result:
    """All texts of a request, by index."""

    id: str
    completions: tuple[Completion, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.completions[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the first completion."""
        return self.completions[0].tokens


@dataclass
class Handle:
    """A request on its way: iterate over it (also `async for`) for what comes, or wait for `result()`.

    Every reader sees every delta from the beginning.
    """

    id: str
    _cancel: Callable[[], None]
    _deltas: list[Delta] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _result: Result | None = None
    _error: Exception | None = None
    _listeners: list[Callable[[], None]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether it has ended: finished, cancelled or failed."""
        return self._result is not None or self._error is not None

    def cancel(self) -> None:
        """Let it end where it is, and give its pages back; nothing happens where it has ended."""
        self._cancel()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the whole result.

        Raises:
            TimeoutError: it has not ended after `timeout` seconds; it goes on.
            ServeError: a step failed, or the engine was closed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.id} has not ended after {timeout} seconds")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def __iter__(self) -> Iterator[Delta]:
        place = 0
        while True:
            new = self._after(place)
            if not new:
                if self._error is not None:
                    raise self._error
                return
            place += len(new)
            yield from new

    def _after(self, place: int) -> list[Delta]:
        """Wait for deltas from `place` on; none where there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._deltas) > place or self.done)
            return self._deltas[place:]

    async def __aiter__(self) -> AsyncIterator[Delta]:
        loop, woken, place = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            with suppress(RuntimeError):  # the reader's loop is closed: nobody reads any more
                loop.call_soon_threadsafe(woken.set)

        with self._changed:
            self._listeners.append(wake)
        try:
            while True:
                woken.clear()
                with self._changed:
                    new, done = self._deltas[place:], self.done
                place += len(new)
                for delta in new:
                    yield delta
                if not new and done:
                    if self._error is not None:
                        raise self._error
                    return
                if not new:
                    await woken.wait()
        finally:
            with self._changed:
                self._listeners.remove(wake)

    async def taken(self) -> None:
        """Wait until an engine has it: one of this process has, once `submit` has returned.

        Raises:
            InputError, LimitError, BusyError, ServeError: none takes it.
        """

    async def wait(self) -> Result:
        """As `result`, in a coroutine.

        Raises:
            ServeError: a step failed, or the engine was closed.
        """
        async for _ in self:
            pass
        return self.result()

    # ---- the engine's side

    def put(self, delta: Delta) -> None:
        """Tell readers what a step adds."""
        with self._changed:
            self._deltas.append(delta)
            self._tell()

    def finish(self, result: Result) -> None:
        """Tell readers that all texts have ended."""
        with self._changed:
            if not self.done:
                self._result = result
            self._tell()

    def fail(self, error: Exception) -> None:
        """Tell readers that nothing more will come, and why."""
        with self._changed:
            if not self.done:
                self._error = error if isinstance(error, ServeError) else ServeError(str(error))
            self._tell()  # also where it has ended: to tell that may have been what failed

    def _tell(self) -> None:
        self._changed.notify_all()
        for wake in self._listeners:
            wake()
