"""The live view of an engine: what it shows, and that it is drawn while it is open."""

from __future__ import annotations

import io
import sys

import pytest

from kvcompile.serve.stats import Stats
from kvcompile.serve.top import Top
from kvcompile.util.console import render

STATS = Stats(
    waiting=4,
    running=3,
    swapped=2,
    requests=1200,
    finished=1190,
    failed=1,
    cancelled=5,
    prompt_tokens=2000,
    completion_tokens=4321,
    cached_tokens=500,
    preemptions=6,
    recomputed_tokens=70,
    swapped_bytes=1 << 20,
    steps=999,
    pages=100,
    pages_held=50,
    pages_cached=20,
    bytes=1 << 30,
    tokens_per_second=12.25,
    prefix_cache="on",
)


def test_what_it_shows() -> None:
    text = render(Top(lambda: STATS, "smollm2 at http://127.0.0.1:8000/v1")())
    for told in (
        "smollm2 at http://127.0.0.1:8000/v1",
        "3 running, 4 waiting, 2 swapped",
        "1,190 finished, 1 failed, 5 cancelled",
        "50 held, 20 cached, of 100",
        "█" * 15 + "▒" * 6 + "·" * 9 + " ",
        "1 GiB",
        "25% of 2,000 prompt tokens; prefix cache on",
        "12.2",
        "4,321 in 999 steps",
        "6 times: 70 tokens again, 1 MiB moved",
    ):
        assert told in text, text
    assert max(map(len, text.splitlines())) <= 100


def test_an_engine_that_has_done_nothing() -> None:
    text = render(Top(Stats, "x")())
    assert "0% of 0 prompt tokens" in text and "·" * 30 in text


def test_speeds_are_remembered() -> None:
    speeds = iter([0.0, 4.0, 8.0, *[8.0] * 60])
    top = Top(lambda: Stats(tokens_per_second=next(speeds)), "x")
    assert "▁" in render(top())
    assert "▁█" in render(top())
    assert "▁▅█" in render(top())
    for _ in range(50):
        text = render(top())
    assert text.count("█") == 40  # no more than there is room for


def test_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with Top(lambda: STATS, "smollm2").shown():
        pass
    assert "3 running" in written.getvalue()
