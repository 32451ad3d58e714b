"""What must hold of a scheduler's pages at any time."""

from __future__ import annotations

from collections import Counter

from kvcompile.serve.schedule import Scheduler
from kvcompile.serve.texts import State


def check(scheduler: Scheduler) -> None:
    for number, pages in enumerate(scheduler.pages):
        pages.check()
        held = Counter(page for text in scheduler.texts.values() for page in {*text.tables[number]})
        for page in range(1, pages.group.pages + 1):
            assert pages.references(page) == held[page]
    assert len(scheduler.running) <= scheduler.rules.rows
    on_host = sum(t.state is State.SWAPPED for t in scheduler.texts.values())
    assert (
        on_host == len(scheduler._on_host) and sum(scheduler._on_host.values()) <= scheduler.rules.host_bytes
    )
