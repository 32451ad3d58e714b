"""Clients that come and go on an engine for a while: at random, with failures, and with what must hold at the end."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcompile.errors import BusyError, LimitError, ServeError
from kvcompile.serve import Engine, Sampling
from kvcompile.serve.live import LiveRequest, LiveText
from kvcompile.serve.request import Delta, Handle, Result
from tests.support.serving_pages import check

PATIENCE = 6000  # looks, a hundredth of a second apart, until what has not ended is said not to end
Known = dict[tuple[int, ...], tuple[int, ...]]  # prompts, and what follows them


@dataclass
class Ends:
    """How requests have ended, by what their handles were told; wrong: what must not be."""

    of: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Ends) -> None:
        self.of += other.of
        self.refused += other.refused
        self.compared += other.compared
        self.wrong += other.wrong


@dataclass
class Mishaps:
    """How often what a step calls fails: before it has done anything, or after."""

    run: float = 0.0
    move: float = 0.0
    fork: float = 0.0
    seed: int = 0
    happened: Counter[str] = field(default_factory=Counter)

    def befall(self, engine: Engine) -> None:
        draw = random.Random(self.seed)

        def failing(name: str, own: Callable[..., Any], share: float) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                early, late = draw.random() < share / 2, draw.random() < share / 2
                self.happened[name] += early or late
                if early:
                    raise RuntimeError(f"{name}: before")
                out = own(*args, **kwargs)
                if late:
                    raise RuntimeError(f"{name}: after")
                return out

            return call

        for name in ("run", "move", "fork"):
            own = getattr(engine._passes, name)
            setattr(engine._passes, name, failing(name, own, getattr(self, name)))


class Client:
    """One thread that submits, reads, cancels and checks what it was given."""

    def __init__(
        self,
        engine: Engine,
        seed: int,
        known: Known,
        lengths: tuple[int, int],
        per_second: float,
        exact: bool,
    ):
        self.engine, self.draw, self.ends = engine, random.Random(seed), Ends()
        self.known, self.lengths, self.per_second, self.exact = known, lengths, per_second, exact
        self._open: list[tuple[Handle, tuple[int, ...], Sampling, float, list[str]]] = []
        self._salts = ("", "a", "b")

    def run(self, until: float) -> None:
        try:
            while time.monotonic() < until:
                time.sleep(min(self.draw.expovariate(self.per_second), 0.5))
                self._submit()
                self._look()
            for _ in range(PATIENCE):
                if not self._open:
                    break
                time.sleep(0.01)
                self._look()
            self.ends.wrong += [f"{entry[0].id} has not ended" for entry in self._open]
        except Exception as error:  # else a thread's would be lost
            self.ends.wrong.append(f"a client: {type(error).__name__}: {error}")
        finally:
            self._open.clear()

    def _submit(self) -> None:
        draw = self.draw
        if draw.random() < 0.4:
            prompt = draw.choice(list(self.known))
            sampling = Sampling(max_tokens=len(self.known[prompt]), ignore_eos=True)
        else:
            least, most = self.lengths
            common = draw.choice(list(self.known))[: draw.randint(0, most)]
            prompt = (*common, *(draw.randrange(3, 60) for _ in range(draw.randint(least, most))))[:most]
            sampling = Sampling(
                max_tokens=draw.randint(1, 24),
                temperature=draw.choice([0.0, 0.7, 1.3]),
                top_k=draw.choice([0, 5]),
                top_p=draw.choice([1.0, 0.9]),
                repetition_penalty=draw.choice([1.0, 1.2]),
                seed=draw.choice([None, 1]),
                n=draw.choice([1, 1, 1, 2, 3]),
                ignore_eos=draw.random() < 0.5,
                logprobs=draw.choice([None, 2]),
            )
        if draw.random() < 0.02:
            prompt = prompt * 40  # longer than any text may be
        try:
            handle = self.engine.submit(prompt, sampling, salt=draw.choice(self._salts))
        except (BusyError, LimitError) as error:
            self.ends.refused[type(error).__name__] += 1
            return
        told: list[str] = []
        _count_ends(handle, told)
        leaves = time.monotonic() + draw.choice([0.0, 0.02, 0.1]) if draw.random() < 0.15 else float("inf")
        self._open.append((handle, prompt, sampling, leaves, told))

    def _look(self) -> None:
        """Cancel who has had enough, and check who has ended."""
        now, still = time.monotonic(), []
        for entry in self._open:
            handle, prompt, sampling, leaves, told = entry
            if handle.done:
                self._ended(handle, prompt, sampling, told)
                continue
            if now >= leaves:
                handle.cancel()
            still.append(entry)
        self._open = still

    def _ended(self, handle: Handle, prompt: tuple[int, ...], sampling: Sampling, told: list[str]) -> None:
        try:
            result = handle.result(0)
        except ServeError:
            self.ends.of["failed"] += 1
            return
        finishes = {completion.finish for completion in result.completions}
        self.ends.of["cancelled" if "cancelled" in finishes else "finished"] += 1
        if len(result.completions) != sampling.n:
            self.ends.wrong.append(f"{handle.id}: {len(result.completions)} texts of {sampling.n}")
        self.ends.wrong += _against_deltas(handle, result)
        expected = self.known.get(prompt) if self.exact else None
        if expected is not None and sampling.greedy and sampling.n == 1 and not sampling.penalizes:
            own = result.completions[0].tokens
            self.ends.compared += 1
            if own != expected[: len(own)]:
                self.ends.wrong.append(f"{handle.id}: {own} after {prompt}, and not {expected}")
        if len(told) > 1:
            self.ends.wrong.append(f"{handle.id} ended more than once: {told}")


def _count_ends(handle: Handle, told: list[str]) -> None:
    """Note what a handle is told of its end; what came before it was handed out is not seen, but `done` is."""
    finish, fail = handle.finish, handle.fail

    def finished(result: Result) -> None:
        told.append("finish")
        finish(result)

    def failed(error: Exception) -> None:
        told.append("fail")
        fail(error)

    handle.finish, handle.fail = finished, failed  # type: ignore[method-assign]


def _against_deltas(handle: Handle, result: Result) -> list[str]:
    """What a reader of the stream has seen is the result, and nothing came after an end."""
    deltas: list[Delta] = list(handle)
    wrong = []
    for completion in result.completions:
        own = [delta for delta in deltas if delta.index == completion.index]
        tokens = tuple(token for delta in own for token in delta.tokens)
        ends = [place for place, delta in enumerate(own) if delta.finish is not None]
        if tokens != completion.tokens or ends != [len(own) - 1] or own[-1].finish != completion.finish:
            wrong.append(f"{handle.id}, text {completion.index}: {own} is not {completion}")
    return wrong


def soak(
    make: Callable[[], Engine],
    known: Known,
    seconds: float,
    lengths: tuple[int, int],
    mishaps: Mishaps,
    seed: int,
    *,
    exact: bool,
    clients: int = 3,
    per_second: float = 30.0,
) -> tuple[Ends, Any]:
    """Let clients come to a new engine for so long; how their requests ended, and the engine's own count.

    exact: greedy texts of `known` prompts must be what is known to follow them.

    Everything that an engine must be at its end is asserted here.
    """
    ends = Ends()
    with make() as engine:
        mishaps.befall(engine)
        until = time.monotonic() + seconds
        all_of_them = [
            Client(engine, seed * 100 + i, known, lengths, per_second, exact) for i in range(clients)
        ]
        threads = [threading.Thread(target=client.run, args=(until,)) for client in all_of_them]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in all_of_them:
            ends.add(client.ends)
        stats = engine.stats()
        assert not ends.wrong, ends.wrong[:5]
        assert stats.requests == sum(ends.of.values()) == stats.finished + stats.failed + stats.cancelled
        assert dict(ends.of) == {
            name: count for name in ("finished", "failed", "cancelled") if (count := getattr(stats, name))
        }
        assert stats.waiting == stats.running == stats.swapped == stats.pages_held == 0, stats
        _nothing_left(engine)
    return ends, stats


def _nothing_left(engine: Engine) -> None:
    """No request, no row, nothing on the host, and every page as good as free."""
    assert not engine._requests and not engine._texts and not engine._inbox
    scheduler, passes = engine._scheduler, engine._passes
    assert not scheduler.texts and not scheduler._on_host and not passes._on_host
    assert set(passes.rows._at) == {None} and not passes.rows._row
    check(scheduler)
    for pages in scheduler.pages:
        assert pages.available == pages.group.pages
    for name in passes.rows._tables:
        assert not passes.rows.buffers[name].any(), f"{name}: tables of texts that have ended"


def left_over() -> list[Any]:
    """Requests and texts that somebody still holds."""
    gc.collect()
    kinds = (LiveRequest, LiveText, Handle)  # by type: `isinstance` wakes what is lazy
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def known_prompts(greedy: Callable[[Sequence[int]], tuple[int, ...]], count: int, most: int) -> Known:
    """Prompts whose likeliest texts are clear, some of which begin alike; greedy gives () where they are not."""
    draw, found = random.Random(0), {}
    common = [draw.randrange(3, 60) for _ in range(most)]
    while len(found) < count:
        kept = draw.choice([0, 0, 5, 8, 16, 17])
        prompt = (*common[:kept], *(draw.randrange(3, 60) for _ in range(draw.randint(1, 12))))[:most]
        if prompt not in found and (text := greedy(prompt)):
            found[prompt] = text
    return found
