"""What rank 0 tells the others, where it breaks off on its way, or nobody is there to hear it; in one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import kvcompile
from kvcompile.errors import RankError, ServeError
from kvcompile.runtime.parallel.group import Group
from kvcompile.runtime.parallel.options import Parallel
from kvcompile.serve import Sampling, ranks
from tests.serve.test_torn import nothing_left
from tests.support.models import tiny_hf
from tests.support.serving import Stepped


def channel(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> tuple[ranks.Channel, list[str]]:
    """One on which whatever is sent fails by an error, where there is one; and what was."""
    told: list[str] = []

    def fails(message: list[Any], **_: Any) -> None:
        told.append(message[0][0])
        if error is not None:
            raise error

    monkeypatch.setattr(ranks.dist, "broadcast_object_list", fails)
    group, made = object.__new__(Group), object.__new__(ranks.Channel)
    group.options, group.rank, group.size, group.failed = Parallel(tensor=2), 0, 2, None
    made.group, made.alone, made._channel = group, threading.RLock(), None  # type: ignore[assignment]
    return made, told


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no memory"), KeyboardInterrupt()])
def test_nothing_follows_what_broke_off(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The others may have half of it: they would take the next for the rest."""
    made, told = channel(monkeypatch, error)
    with pytest.raises(type(error)):
        made.tell("limit", 1)
    with pytest.raises(RankError, match="what rank 0 tells was broken off"):
        made.tell("limit", 1)
    assert told == ["limit"]


def test_texts_end_with_the_ranks_that_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those on the host and those that were to come back, too; each is told why."""
    caplog.set_level("CRITICAL", "kvcompile")
    recipe: Any = {"cache": {"placement": {"kind": "paged", "page_size": 8}}}
    off: Any = {"verify": "off", "compile": {"mode": "none"}}
    module = kvcompile.optimize(tiny_hf(layers=1), recipe, max_tokens=40, max_batch=3, prefill_chunk=8, **off)
    with Stepped(module) as whole:
        rules = whole._scheduler.rules
        memory = 7 * sum(rules.page_bytes) + rules.rows * rules.row_bytes
    with Stepped(module, memory=memory, host_memory="1MiB") as engine:
        prompts = [[5 + number, *range(10, 22)] for number in range(3)]
        handles = [engine.submit(prompt, Sampling(max_tokens=20, ignore_eos=True)) for prompt in prompts]
        while not engine._scheduler._on_host:
            engine.turn()
        made, told = channel(monkeypatch, RuntimeError("gloo: Connection closed by peer"))
        engine._scheduler._below = ranks.LeadingTiers(engine._tiers, made)
        engine._fail(list(engine._texts), RankError("rank 1 is gone"))
        for handle in handles:
            with pytest.raises(ServeError, match="rank 1 is gone"):
                handle.result(0)
        assert told == ["limit"] and made.group.failed and nothing_left(engine)


def test_nothing_is_told_beside_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who compiles listens to nobody: a sign of life that is told meanwhile would find no one within its time limit."""
    made, told = channel(monkeypatch, None)
    leading: Any = object.__new__(ranks.Leading)
    leading._channel = made

    def steps() -> None:
        with leading._everywhere("pass_apart"):
            pass

    engine = [threading.Thread(target=leading.idle), threading.Thread(target=steps)]
    with leading._everywhere("warm"):
        for thread in engine:
            thread.start()
        engine[0].join(10)
        engine[1].join(0.2)
        assert told == ["warm"] and [thread.is_alive() for thread in engine] == [False, True]
    engine[1].join(10)
    leading.idle()
    assert told == ["warm", "pass_apart", "idle"]
