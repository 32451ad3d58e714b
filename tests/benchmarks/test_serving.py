"""What serving.py makes of an engine's steps, its loads, and what it is held to: on a tiny model."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvcompile
from kvcompile.serve import Engine
from kvcompile.serve.request import Handle
from tests.support.models import tiny_hf

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of benchmarks/, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture(scope="module")
def module() -> Any:
    options = {"verify": "off", "compile": {"mode": "none"}, "max_tokens": 96, "max_batch": 8}
    return kvcompile.optimize(tiny_hf(), "paged", prefill_chunk=16, **options)


class Words:
    """Pieces as `serving_loads.Text` gives them, of a small vocabulary."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def piece(self, tokens: int) -> list[int]:
        return [self._draw.randrange(3, 60) for _ in range(tokens)]


def test_steps_add_up(room: Any, module: Any) -> None:
    watch_of, loads = room("serving_watch"), room("serving_loads")
    own = Handle.put
    with Engine(module) as engine, watch_of.watched(engine, pages=True) as watch:
        asks = [loads.Ask(prompt, 5) for prompt in ([5] * 20, [6] * 3, [7] * 9)]
        results, took = watch_of.run(engine, asks)
    assert [len(result.tokens) for result in results] == [5, 5, 5]
    assert sum(step.chunks for step in watch.steps) == 32
    assert sum(step.decodes for step in watch.steps) == 3 * 4, "the first token of each comes of its prompt"
    assert len(watch.gaps()) == 3 * 4 and all(gap > 0 for gap in watch.gaps())
    for step in watch.steps:
        assert 0 < step.rest < step.whole < took
        assert (step.decode > 0) == (step.decodes > 0) and (step.chunk > 0) == (step.chunks > 0)
    assert 0 < max(step.waste for step in watch.steps) < 1
    assert max(step.held for step in watch.steps) == 2 + 1 + 1
    assert Handle.put is own and "run_pass" not in vars(module), "the watch is still there"


def test_loads_are_the_same_each_time(room: Any) -> None:
    loads = room("serving_loads")
    one, other = loads.offline(Words(), 6), loads.offline(Words(), 6)
    assert one == other and all(16 <= len(ask.prompt) <= 512 and 16 <= ask.new <= 128 for ask in one)
    times = [ask.at for ask in loads.poisson(loads.offline(Words(), 400), 4.0)]
    assert times == sorted(times) and times[0] == 0
    assert 80 < times[-1] < 125, "400 requests, four a second"


def test_no_two_pieces_begin_alike(room: Any) -> None:
    text = room("serving_loads").Text(lambda text, verbose: {"input_ids": list(range(100))})
    pieces = [text.piece(30) for _ in range(12)]
    assert len({piece[0] for piece in pieces}) == 12
    assert all(piece == list(range(piece[0], piece[0] + 30)) for piece in pieces)


@pytest.mark.parametrize("load", ["samples", "shared", "turns", "waste", "arrivals"])
def test_a_load_runs(room: Any, module: Any, load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speed, waits, rooms, loads = map(
        room, ("serving_speed", "serving_waits", "serving_room", "serving_loads")
    )
    monkeypatch.setattr(loads, "PROMPTS", (4, 20))
    monkeypatch.setattr(loads, "OUTPUTS", (4, 8))
    monkeypatch.setattr(waits, "COMMON", 32)
    monkeypatch.setattr(waits, "OWN", 4)
    monkeypatch.setattr(waits, "SAID", 8)
    monkeypatch.setattr(rooms, "SAMPLED", {"prompts": (16, 21), "new": 6})
    bench = speed.Bench("tiny", module, Words(), True, 1, 1, (), lambda text: None)
    found = getattr(waits if load in ("shared", "turns", "arrivals") else rooms, load)(bench)
    if load == "samples":
        assert found["16"]["pages"] == 1 + 8 and found["21"]["pages"] == 1 + 8
    elif load == "shared":
        assert found["hit_s"] > 0 and found["cold_s"] > 0
    elif load == "turns":
        assert found["off"]["cached_share"] == 0 < found["on"]["cached_share"] < 1
    elif load == "waste":
        assert 0 < found["pages"] < 1
    else:
        assert 0 < found["first_token_s"]["p50"] <= found["first_token_s"]["p99"]


def test_goals(room: Any) -> None:
    goals = room("serving_goals")
    loads = {"decodes": {"ratio": 4.5, "rest_share": 0.05}}
    found = {name: (value, met) for name, _, value, met in goals.lines(loads)}
    assert found["decode, 8 texts at 512 / one"] == ("4.500", "yes")
    assert found["scheduler and tables / step of 8"] == ("0.050", "no")
    assert sum(value == "not measured" for value, _ in found.values()) == len(goals.GOALS) - 2


def test_a_peer_that_gives_less_has_failed(room: Any) -> None:
    peers, loads = room("serving_peers"), room("serving_loads")
    peer = SimpleNamespace(name="x", say=lambda request: {"tokens": len(request["asks"]), "seconds": 2.0})
    assert peers.answer(peer, [loads.Ask([1], 1)]) == 2.0
    with pytest.raises(RuntimeError, match="x gave 1 of 3 tokens"):
        peers.answer(peer, [loads.Ask([1], 3)])
