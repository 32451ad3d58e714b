"""The engine as its callers meet it: what fails or leaves takes nobody along, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.errors import BusyError, InputError, LimitError, PlanError, ServeError
from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Engine, Sampling
from kvcompile.serve.request import Handle
from tests.support.models import tiny_hf
from tests.support.serving import Stepped

SOME = Sampling(max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12]]


@lru_cache
def module(recipe: str = "paged") -> CachedModel:
    return kvcompile.optimize(
        tiny_hf(), recipe, verify="off", compile={"mode": "none"}, max_tokens=64, max_batch=4
    )


@pytest.fixture
def engine() -> Any:
    with Stepped(module()) as made:
        yield made


def greedy(prompt: list[int], tokens: int = 8) -> tuple[int, ...]:
    out = module().generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return tuple(out[0, len(prompt) :].tolist())


def empty(engine: Stepped) -> bool:
    stats = engine.stats()
    rows = engine._passes.rows
    return stats.pages_held == stats.running == stats.waiting == 0 and set(rows._at) == {None}


def test_a_thread_runs_what_comes() -> None:
    with Engine(module()) as engine:
        results = engine.generate(PROMPTS, SOME)
        assert [result.tokens for result in results] == [greedy(prompt) for prompt in PROMPTS]

        async def ask() -> list[int]:
            handle = engine.submit(PROMPTS[0], SOME)
            tokens = [token async for delta in handle for token in delta.tokens]
            assert (await handle.wait()).tokens == tuple(tokens)
            return tokens

        assert tuple(asyncio.run(ask())) == greedy(PROMPTS[0])
        handle = engine.submit(PROMPTS[1], SOME)
        assert tuple(token for delta in handle for token in delta.tokens) == greedy(PROMPTS[1])


def test_who_leaves_gives_everything_back(engine: Stepped) -> None:
    gone, stays = engine.submit(PROMPTS[0], SOME), engine.submit(PROMPTS[1], SOME)
    engine.turn()
    engine.turn()
    gone.cancel()
    engine.finish([gone, stays])
    completion = gone.result(0).completions[0]
    assert (
        completion.finish == "cancelled" and completion.tokens == greedy(PROMPTS[0])[: len(completion.tokens)]
    )
    assert stays.result(0).tokens == greedy(PROMPTS[1]) and empty(engine) and engine.stats().cancelled == 1


def test_who_leaves_from_the_host_leaves_nothing_there() -> None:
    with Stepped(module(), host_memory=1 << 20) as engine:
        handle = engine.submit(PROMPTS[0], SOME)
        engine.turn()
        engine.turn()
        moves: list[Any] = []
        engine._scheduler._preempt(engine._scheduler.running[0], moves)
        engine._passes.move(moves, {})
        assert engine._passes._on_host and engine._scheduler._on_host
        handle.cancel()
        engine.finish([handle])
        assert not engine._passes._on_host and not engine._scheduler._on_host and empty(engine)


def test_an_old_handle_cancels_no_new_request_of_its_name(engine: Stepped) -> None:
    first = engine.submit(PROMPTS[0], SOME, id="mine")
    engine.finish([first])
    second = engine.submit(PROMPTS[1], SOME, id="mine")
    first.cancel()
    assert engine.finish([second])[0].tokens == greedy(PROMPTS[1])


@pytest.mark.parametrize("where", ["pass", "pick", "text", "move"])
def test_what_fails_takes_nobody_along(engine: Stepped, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """move: the failing text is alone in the step that fails."""
    if where == "move":
        bad = engine.submit(PROMPTS[0], SOME)
        monkeypatch.setattr(engine._passes, "move", _raises)
        engine.turn()
        monkeypatch.undo()
        good = engine.submit(PROMPTS[1], SOME)
    else:
        good, bad = engine.submit(PROMPTS[1], SOME), engine.submit(PROMPTS[0], SOME)
        engine.turn()
        live = next(iter(r for r in engine._requests.values() if r.handle is bad)).texts[0]
        if where == "pass":  # of the prompt of a third
            bad = engine.submit(PROMPTS[2] * 2, SOME)
            monkeypatch.setattr(engine, "_prefill", _raises)
            engine.turn()
            monkeypatch.undo()
        elif where == "pick":
            monkeypatch.setattr(live.picker, "sampling", None)
        else:
            monkeypatch.setattr(live.ends, "take", _raises)
    for _ in range(20):
        engine.turn()
    with pytest.raises(ServeError, match="a step of this request failed"):
        bad.result(0)
    assert good.result(0).tokens == greedy(PROMPTS[1]) and empty(engine) and engine.stats().failed == 1


def _raises(*_: Any) -> None:
    raise RuntimeError("broken")


def test_one_failed_text_of_several_fails_its_request_alone(
    engine: Stepped, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = engine.submit(PROMPTS[0], Sampling(max_tokens=8, n=3, ignore_eos=True))
    good = engine.submit(PROMPTS[1], SOME)
    engine.turn()
    monkeypatch.setattr(engine._requests[several.id].texts[1].ends, "take", _raises)
    engine.finish([good])
    with pytest.raises(ServeError, match="RuntimeError: broken"):
        several.result(0)
    assert good.result(0).tokens == greedy(PROMPTS[1]) and empty(engine)


def test_samples_share_what_they_have_in_common(engine: Stepped) -> None:
    """Pages of n texts: those of the prompt once, and of each its own."""
    prompt = list(range(3, 3 + 33))
    handle = engine.submit(prompt, Sampling(max_tokens=2, n=4, temperature=1.0, seed=1, ignore_eos=True))
    while not engine._texts or any(live.text.left != 1 for live in engine._texts.values()):
        engine.turn()
    size = engine._scheduler.pages[0].group.page_size
    assert engine.stats().pages_held == -(-len(prompt) // size)
    engine.turn()
    assert handle.done and empty(engine)


def test_a_closed_engine_fails_what_it_had() -> None:
    engine = Engine(module())
    handle = engine.submit(PROMPTS[0], Sampling(max_tokens=60, ignore_eos=True))
    engine.close()
    engine.close()
    if not handle.done or handle._error:
        with pytest.raises(ServeError, match="was closed"):
            handle.result(1)
    with pytest.raises(ServeError, match="is closed"):
        engine.submit(PROMPTS[0])


def test_a_drained_engine_ends_what_it_had() -> None:
    engine = Engine(module())
    handle = engine.submit(PROMPTS[0], SOME)
    engine.close(drain=30)
    assert handle.result(0).tokens == greedy(PROMPTS[0])


@pytest.mark.parametrize("where", ["plan", "thread"])
def test_a_defect_of_ours_lets_nobody_wait(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(module())
    monkeypatch.setattr(engine._scheduler, "plan", _raises)
    if where == "thread":
        monkeypatch.setattr(engine, "_fail", _raises)
        monkeypatch.setattr("threading.excepthook", lambda _: None)
    with pytest.raises(ServeError):
        engine.submit(PROMPTS[0]).result(10)
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "told"),
    [
        ([], SOME, InputError, "at least one token"),
        ([61], SOME, InputError, "from 0 to 60, got 61"),
        ([1, -1], SOME, InputError, "got -1"),
        (["a"], SOME, InputError, "got 'a'"),
        (5, SOME, InputError, "got int"),
        ("text", SOME, InputError, "no tokenizer"),
        ([5] * 65, SOME, LimitError, "runtime.max_tokens"),
    ],
)
def test_bad_requests(
    engine: Stepped, prompt: Any, sampling: Sampling, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        engine.submit(prompt, sampling)
    assert empty(engine) and not engine._requests


def test_a_full_queue_and_a_name_twice() -> None:
    with Stepped(module(), max_queue=2) as engine:
        handles: list[Handle] = [engine.submit([5], SOME, id=name) for name in "ab"]
        with pytest.raises(BusyError):
            engine.submit([5], SOME)
        engine.turn()
        with pytest.raises(InputError, match="on its way"):
            engine.submit([5], SOME, id="a")
        engine.finish(handles)


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"prefix_cache": "maybe"}, InputError, r"prefix_cache: expected .auto., .on. or .off., got .maybe."),
        ({"max_sequences": 0}, InputError, "max_sequences"),
        ({"memory": "0"}, InputError, "memory: expected at least one byte"),
        ({"host_memory": "much"}, InputError, "host_memory: expected a size"),
        ({"max_queue": 0, "packed": "no"}, InputError, r"max_queue: .*; packed: "),
        ({"watermark": float("nan")}, InputError, "watermark"),
        ({"memory": 1000}, LimitError, "takes at least"),
        ({"recipe": "int8"}, InputError, "optimized already"),
    ],
)
def test_bad_settings(settings: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        Engine(module(), **settings)


def test_the_recipe_says_how_it_is_served() -> None:
    served = {"prefix_cache": False, "max_sequences": 3, "max_queue": 1, "memory": "20KiB"}  # YAML's word off
    paged = {"placement": {"kind": "paged", "page_size": 8}}
    fast = kvcompile.optimize(
        tiny_hf(), {"cache": paged, "serve": served}, verify="off", compile={"mode": "none"}, max_tokens=64
    )
    with Stepped(fast) as engine:
        stats = engine.stats()
        assert stats.prefix_cache == "off: asked for" and 16 << 10 < stats.bytes <= 20 << 10
        engine.submit([5], SOME)
        with pytest.raises(BusyError, match="1 request"):
            engine.submit([5], SOME)
    with Stepped(fast, prefix_cache="on", max_sequences=2) as engine:  # the caller has the last word
        assert engine.stats().prefix_cache == "on"


def test_what_shares_nothing_says_so() -> None:
    with pytest.raises(
        PlanError, match="contiguous slots are in no page, and snapshots of them have no memory"
    ):
        Engine(module("baseline"), prefix_cache="on", snapshot_memory=0)
    with Stepped(module(), prefix_cache="off") as engine:
        assert engine.stats().prefix_cache == "off: asked for"


def test_a_text_too_long_for_the_pages_is_refused_at_once() -> None:
    recipe = {"cache": {"placement": {"kind": "paged", "page_size": 8}}}
    fast = kvcompile.optimize(tiny_hf(), recipe, verify="off", compile={"mode": "none"}, max_tokens=64)
    page = 2 * 2 * 2 * 8 * 8 * 4  # layers, K and V, KV heads, tokens, channels, bytes
    with Stepped(fast, max_sequences=1, memory=3 * page + 4 * 8) as engine:  # page 0, and a table of 8 pages
        with pytest.raises(LimitError, match="needs 3 pages of 8 tokens, and the engine has 2"):
            engine.submit([5] * 10, Sampling(max_tokens=8))
        engine.all([[5] * 10], Sampling(max_tokens=7, ignore_eos=True))
