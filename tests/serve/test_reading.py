"""What is in files is read while texts that run go on, and is the same as if all had waited for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcompile.serve import Engine, Sampling
from kvcompile.serve.disk import Disk
from kvcompile.serve.pages import Key
from kvcompile.serve.reading import Reading
from kvcompile.serve.store import Item
from kvcompile.serve.tiers import Tiers
from tests.serve.test_numerics import module

KEYS = [bytes([number]) * 32 for number in range(9)]
PROMPT = list(range(3, 53))
LONG = Sampling(max_tokens=60, ignore_eos=True)
SHORT = Sampling(max_tokens=3, ignore_eos=True)


class Slow:
    """A store that is read when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[Key] = []

    def lookup(self, key: Key) -> bool:
        return True

    def load(self, key: Key) -> Item | None:
        self.begun.append(key)
        assert self.go.wait(30)
        if key == KEYS[8]:
            raise OSError("the disk is gone")
        return Item(torch.full((4,), key[0], dtype=torch.uint8))

    def store(self, key: Key, item: Item) -> None:
        raise AssertionError("nothing is stored here")


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.go.set()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def test_what_is_asked_for_is_read_once_and_taken(slow: Slow) -> None:
    reading, done = Reading(slow), threading.Event()
    reading.done = done.set
    assert not reading.ask(KEYS[:2]) and reading.busy and not done.is_set()
    assert not reading.ask(KEYS[:3]), "more of it"
    slow.go.set()
    assert done.wait(30)
    until(lambda: not reading.busy)
    assert reading.ask(KEYS[:3])
    found = [reading.take(key) for key in KEYS[:3]]
    assert [None if each is None else int(each.data[0]) for each in found] == [0, 1, 2]
    assert sorted(slow.begun) == KEYS[:3]
    reading.close()


def test_what_is_wanted_no_more_is_forgotten_and_what_cannot_be_read_is_not_there(slow: Slow) -> None:
    reading = Reading(slow)
    assert not reading.ask(KEYS[:8])
    assert reading.ask(()) and not reading.busy
    slow.go.set()
    reading.ask(KEYS[8:])
    until(lambda: not reading.busy)
    assert reading.take(KEYS[8]) is None
    reading.close()
    assert len(slow.begun) < 9, "what no thread had begun is never read"


def test_tiers_read_ahead_what_they_fetch(slow: Slow) -> None:
    tiers = Tiers(64, 0, slow)
    assert not tiers.begin(KEYS[:2], KEYS[2:3]) and tiers.reading
    slow.go.set()
    until(lambda: not tiers.reading)
    assert tiers.begin(KEYS[:2], KEYS[2:3]) and tiers.fetch(KEYS[:2], KEYS[2:3]) == "store"
    assert [int(tiers.fetched(key).data[0]) for key in KEYS[:3]] == [0, 1, 2]
    tiers.release()
    slow.go.clear()
    assert tiers.begin(KEYS[:2], ()), "they are in the host's memory now"
    slow.go.set()
    tiers.close()


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, list[int]]:
    """A folder with the pages of PROMPT, and what comes after it."""
    with Engine(module("llama", "paged"), store=tmp_path) as engine:
        (result,) = engine.generate([PROMPT], SHORT)
    return tmp_path, result.tokens


def gated(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are read once this is set."""
    go, inner = threading.Event(), Disk.load
    monkeypatch.setattr(Disk, "load", lambda *args: inner(*args) if go.wait(90) else None)
    return go


def test_texts_that_run_go_on_while_files_are_read(
    stored: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = stored
    go, turns = gated(monkeypatch), [0]
    inner = Engine._turn

    def counted(self: Any) -> None:
        turns[0] += 1
        inner(self)

    monkeypatch.setattr(Engine, "_turn", counted)
    with Engine(module("llama", "paged"), store=folder) as engine:
        running = engine.submit([7, 8, 9], LONG)
        until(lambda: engine.stats().running == 1)
        waiting = engine.submit(PROMPT, SHORT)
        assert len(running.result(60).tokens) == 60, "a text to its end, while another waits for files"
        assert not waiting.done and engine.stats().waiting == 1
        before = turns[0]
        time.sleep(0.2)
        assert turns[0] - before <= 2, "nothing to do is not asked for again and again"
        go.set()
        result = waiting.result(60)
        assert result.tokens == wanted and result.usage.cached_tokens == 48
        assert engine.stats().found_store_tokens == 48


def test_a_text_that_is_cancelled_while_it_is_read_leaves_nothing(
    stored: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = stored
    go = gated(monkeypatch)
    with Engine(module("llama", "paged"), store=folder) as engine:
        waiting = engine.submit(PROMPT, SHORT)
        tiers = engine._shared.tiers
        until(lambda: tiers.reading)
        waiting.cancel()
        until(lambda: not tiers.reading)
        assert engine.stats().pages_held == 0 and engine.stats().waiting == 0
        go.set()
        (result,) = engine.generate([PROMPT], SHORT)
        assert result.tokens == wanted and result.usage.cached_tokens == 48
