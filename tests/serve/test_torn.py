"""What a step had begun on the texts of others when it failed: they go on with what is theirs, or end with an error."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

import kvcompile
from kvcompile.errors import ServeError
from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Sampling
from kvcompile.serve import rows as rows_module
from kvcompile.serve.request import Handle
from tests.support.models import tiny_hf
from tests.support.serving import Stepped

PAGED = {"cache": {"placement": {"kind": "paged", "page_size": 8}}}
LONG = [5 + place % 40 for place in range(40)]


@lru_cache
def module(recipe: str) -> CachedModel:
    given: Any = PAGED if recipe == "pages" else recipe
    return kvcompile.optimize(
        tiny_hf(), given, verify="off", compile={"mode": "none"}, max_tokens=64, max_batch=4, prefill_chunk=8
    )


def some(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


def nothing_left(engine: Stepped) -> bool:
    rows = engine._passes.rows
    tables = [rows.buffers[name] for name in rows._tables]
    return (
        not engine._requests
        and not engine._texts
        and engine.stats().pages_held == 0
        and set(rows._at) == {None}
        and not any(table.any() for table in tables)
    )


def told(handle: Handle) -> tuple[int, ...] | None:
    """The tokens of a request that has ended; None: it failed, and says so."""
    try:
        return handle.result(0).tokens
    except ServeError as error:
        assert "a step of this request failed" in str(error)
        return None


def bystander(engine: Stepped) -> tuple[list[Handle], Handle]:
    """Two texts that decode, and one whose prompt comes in the row that they need for their next step."""
    first = engine.submit([5, 6, 7], some(2))
    others = [engine.submit([8, 9], some(12)), engine.submit([12, 13], some(12))]
    engine.turn()
    beside = engine.submit(LONG, some(6))
    engine.turn()
    rows = engine._passes.rows
    assert first.done and rows._at[0] == engine._requests[beside.id].texts[0].text.id
    return others, beside


@pytest.mark.parametrize(
    ("recipe", "after"), [("baseline", 0), ("baseline", 3), ("streaming", 3), ("pages", 0)]
)
def test_no_text_goes_on_in_half_a_row(recipe: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """after: buffers of two rows that have changed places when memory runs out; the clone is what takes some."""
    with Stepped(module(recipe)) as engine:
        _, beside = bystander(engine)
        engine.finish([beside])
        expected = beside.result(0).tokens
    with Stepped(module(recipe)) as engine:
        others, beside = bystander(engine)
        whole, done = rows_module._exchange, [0]

        def full(*parts: Any) -> None:
            done[0] += 1
            if done[0] > after:
                raise RuntimeError("out of memory")
            whole(*parts)

        monkeypatch.setattr(rows_module, "_exchange", full)
        engine.turn()
        monkeypatch.undo()
        for _ in range(20):
            engine.turn()
        assert done[0] > after
        assert told(beside) in (None, expected)
        assert [told(handle) for handle in others] == [None, None]
        for _ in range(20):
            engine.turn()
        assert nothing_left(engine)
        again = engine.submit(LONG, some(6))
        assert engine.finish([again])[0].tokens == expected


def test_who_gave_way_in_a_step_that_failed_leaves_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it has a row that the scheduler counts as free, and the next text finds none."""
    made = module("pages")
    with Stepped(made) as whole:
        rules = whole._scheduler.rules
        memory = 7 * sum(rules.page_bytes) + rules.rows * rules.row_bytes
    with Stepped(made, memory=memory, prefix_cache="off") as engine:
        old = engine.submit(LONG[:16], some(20))
        new = engine.submit(LONG[16:32], some(20))
        own, move = engine._passes.rows.drop, engine._passes.move
        failed: list[Any] = []

        def moving(moves: Any, computed: Any) -> None:
            if moves and not failed:
                failed.extend(moves)
                monkeypatch.setattr(engine._passes.rows, "drop", _first(own))
            move(moves, computed)

        monkeypatch.setattr(engine._passes, "move", moving)
        for _ in range(60):
            engine.turn()
            waits = [text.id for text in engine._scheduler.waiting]
            assert not set(waits) & set(engine._passes.rows._row), "a text that waits has no row"
        assert failed and told(old) is None
        assert told(new) is not None and nothing_left(engine)


def _first(own: Any) -> Any:
    """Fails the first time."""
    calls: list[int] = []

    def call(given: int) -> None:
        calls.append(given)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        own(given)

    return call


def test_who_cannot_leave_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last token is there, and what it has cannot be given back: nobody waits for it for ever."""
    with Stepped(module("pages")) as engine:
        short, other = engine.submit([5, 6], some(3)), engine.submit([7, 8], some(6))
        engine.turn()
        monkeypatch.setattr(engine._passes.rows, "_clear_tables", _first(engine._passes.rows._clear_tables))
        for _ in range(10):
            engine.turn()
        assert short.done and told(short) is None and told(other) is not None
        again = engine.submit([5, 6], some(3))
        engine.finish([again])
        assert nothing_left(engine)


def test_a_plan_that_fails_keeps_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has taken pages, and which of them are in a table nobody knows; the next requests have all of them."""
    with Stepped(module("pages")) as engine:
        first = engine.submit(LONG, some(6))
        expected = engine.finish([first])[0].tokens
        running = engine.submit([5, 6], some(9))
        engine.turn()
        take, taken = engine._scheduler._take, []

        def taking(number: int, moves: Any) -> int:
            taken.append(take(number, moves))
            if len(taken) == 2:
                raise MemoryError
            return taken[-1]

        monkeypatch.setattr(engine._scheduler, "_take", taking)
        failing = engine.submit(LONG[::-1], some(6))
        engine.turn()
        monkeypatch.undo()
        assert len(taken) == 2 and told(running) is None and told(failing) is None and nothing_left(engine)
        again = engine.submit(LONG, some(6))
        assert engine.finish([again])[0].tokens == expected and nothing_left(engine)
