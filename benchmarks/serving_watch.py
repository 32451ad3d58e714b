"""What an engine's steps take, and when its tokens come: noted from outside, by wrapping what a step calls."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Step:
    """Seconds of one step: all of it, passes of one token, passes of chunks, and choosing tokens. The rest is
    scheduling, tables, and telling handles.

    decodes, chunks: texts that took one token, and tokens of chunks
    held, waste: pages in use after it, and the most pages that one text has beyond its tokens in one group
    """

    began: float
    whole: float = 0.0
    decode: float = 0.0
    chunk: float = 0.0
    pick: float = 0.0
    decodes: int = 0
    chunks: int = 0
    held: int = 0
    waste: float = 0.0

    @property
    def rest(self) -> float:
        return self.whole - self.decode - self.chunk - self.pick


@dataclass
class Watch:
    """Steps of an engine, and by request the moments at which its tokens came."""

    steps: list[Step] = field(default_factory=list)
    came: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens of one text each; requests of one text only."""
        return [b - a for times in self.came.values() for a, b in pairwise(times)]


@contextmanager
def watched(engine: Any, pages: bool = False) -> Iterator[Watch]:
    """Note what the engine does meanwhile.

    Args:
        pages: note pages, too, which takes time between steps.
    """
    from kvcompile.serve import loop as rooms
    from kvcompile.serve.request import Handle

    watch = Watch()
    now = time.perf_counter
    current: list[Step] = []

    def turn() -> None:
        current[:] = [Step(now())]
        step = current[0]
        own_turn()
        step.whole = now() - step.began
        if pages:
            scheduler = engine._scheduler
            step.held = sum(each.held for each in scheduler.pages)
            step.waste = max(
                (
                    _waste(text, each, n)
                    for text in scheduler.running
                    for n, each in enumerate(scheduler.pages)
                ),
                default=0.0,
            )
        watch.steps.append(step)

    def run_pass(ids: Any, *args: Any, **kwargs: Any) -> Any:
        began = now()
        out = own_pass(ids, *args, **kwargs)
        step, took = current[0], now() - began
        if ids.shape[1] == 1:
            step.decode += took
            step.decodes += len(ids)
        else:
            step.chunk += took
            step.chunks += ids.numel()
        return out

    def pick(*args: Any, **kwargs: Any) -> Any:
        began = now()
        try:
            return own_pick(*args, **kwargs)
        finally:
            current[0].pick += now() - began

    def put(handle: Any, delta: Any) -> None:
        watch.came[handle.id] += [now()] * len(delta.tokens)
        own_put(handle, delta)

    own_turn, own_pass, own_pick, own_put = engine._turn, engine.module.run_pass, rooms.pick, Handle.put
    rooms.pick = pick  # type: ignore[assignment]
    Handle.put = put  # type: ignore[method-assign]
    engine._turn, engine.module.run_pass = turn, run_pass
    try:
        yield watch
    finally:
        rooms.pick, Handle.put = own_pick, own_put  # type: ignore[method-assign]
        del engine._turn, engine.module.run_pass


def _waste(text: Any, pages: Any, number: int) -> float:
    """Pages that a text has beyond what its tokens fill, in one group."""
    group = pages.group
    tokens = text.computed if text.left == 1 else len(text.tokens)  # a prompt comes in with all its pages
    return float(len(text.tables[number]) - min(tokens, group.slots) / group.page_size)


def run(engine: Any, asks: list[Any]) -> tuple[list[Any], float]:
    """Let an engine answer all requests, each when its time has come; the results, and the seconds that all took."""
    from kvcompile.serve import Sampling

    began = time.perf_counter()
    handles = []
    for ask in asks:
        wait = began + ask.at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        handles.append(engine.submit(ask.prompt, Sampling(max_tokens=ask.new, ignore_eos=True)))
    results = [handle.result() for handle in handles]
    return results, time.perf_counter() - began
