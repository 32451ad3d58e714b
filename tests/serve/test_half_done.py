"""Memory that runs out while the engine notes who has what: everyone is told, nothing is kept, and it goes on."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
from torch import Tensor
from torch.nn.functional import one_hot

import kvcompile
from kvcompile.errors import ServeError
from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Sampling
from kvcompile.serve.engine import Engine
from kvcompile.serve.loop import Loop
from kvcompile.serve.pages import Pages
from kvcompile.serve.request import Handle
from kvcompile.serve.rows import Rows
from kvcompile.serve.schedule import Scheduler
from tests.serve.test_torn import nothing_left
from tests.support.failing_lines import Line, failing, traced
from tests.support.models import tiny_hf
from tests.support.serving import Stepped

# All that changes what says who has what, and who is told.
NOTES: dict[str, list[Any]] = {
    "who comes": [Engine.submit, Loop._tell, Loop._enter, Scheduler.add],
    "who goes": [Loop._leave, Scheduler.end, Scheduler._give_back, Pages.release, Rows.drop],
    "who is told": [Loop._took, Loop._finished, Loop._over, Handle.finish, Handle._tell],
    "what is computed": [Scheduler.computed, Scheduler._register, Pages.register, Scheduler.chosen],
    "forks": [Scheduler.fork, Pages.hold, Rows.fork, Rows._enter],
    "rows": [Rows.arrange, Rows._exchange],
}
PROMPTS = [[5 + place % 40 for place in range(9)], [8, 9], [12, 13, 14]]
SAMPLINGS = [
    Sampling(max_tokens=2, ignore_eos=True, n=2, seed=1, temperature=1.0),
    Sampling(max_tokens=1, ignore_eos=True),
    Sampling(max_tokens=4, ignore_eos=True),
]


@lru_cache
def module() -> CachedModel:
    recipe: Any = {"cache": {"placement": {"kind": "paged", "page_size": 8}}}
    return kvcompile.optimize(
        tiny_hf(layers=1),
        recipe,
        verify="off",
        compile={"mode": "none"},
        max_tokens=24,
        max_batch=4,
        prefill_chunk=8,
    )


def ended(engine: Stepped) -> list[list[tuple[int, ...]] | None]:
    """The texts of all requests; None: it failed, and says so. Who waits for one is told that it has ended."""
    handles, found, told = [], list[list[tuple[int, ...]] | None](), dict[str, bool]()
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        try:
            handles.append(engine.submit(prompt, sampling))
        except MemoryError:  # its caller has no handle
            found.append(None)
        else:
            handles[-1]._listeners.append(partial(_note, handles[-1], told))
    for _ in range(12):
        engine._turn()
    assert told == {handle.id: True for handle in handles}
    for handle in handles:
        try:
            found.append([text.tokens for text in handle.result(0).completions])
        except ServeError:
            found.append(None)
    return found


def _note(handle: Handle, told: dict[str, bool]) -> None:
    """What a reader sees when it is told that something has come."""
    told[handle.id] = handle.done


def counted(ids: Tensor, *_: Any, **__: Any) -> dict[int, Tensor]:
    """A model that counts on: after a token the next id is the likeliest. Its numbers are not looked at here."""
    return {module().program.logits: one_hot((ids + 1) % 61, 61).float()}


@pytest.mark.parametrize("notes", NOTES)
def test_nobody_waits_and_nothing_is_kept(
    notes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "kvcompile")
    monkeypatch.setattr(module(), "run_pass", counted)
    lines: dict[Line, None] = {}
    with Stepped(module()) as engine:
        with traced(NOTES[notes], lines.setdefault):
            expected = ended(engine)
        assert None not in expected and nothing_left(engine) and len(lines) > 10
        for line in lines:
            told = f"{line[0].co_name}, line {line[1]}"
            with failing(NOTES[notes], line, MemoryError) as failed:
                found = ended(engine)
            assert failed, told
            assert all(one is None or one in expected for one in found), told
            assert nothing_left(engine), told
            assert not engine._inbox and not engine._half_done, told
        assert ended(engine) == expected and nothing_left(engine)
