"""How many threads pay: the fewest that are as fast as more; and whoever called has his own again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import kvcompile
from kvcompile import api, pipeline
from kvcompile.util import threads
from kvcompile.util.threads import Sample, renew_threads, threads_that_pay
from tests.support.models import NanoGPT, make

MODEL = nn.Linear(64, 64)


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_measurements", {})
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def sample(monkeypatch: pytest.MonkeyPatch, taken: dict[int, float]) -> list[int]:
    """Samples take what `taken` says; the numbers of threads that were asked."""
    asked: list[int] = []

    def seconds(self: Sample, count: int, loops: int, most: float = float("inf")) -> float:
        asked.append(count)
        return taken[count] if taken[count] <= most else float("inf")

    monkeypatch.setattr(Sample, "seconds", seconds)
    return asked


@pytest.mark.parametrize(
    ("taken", "chosen"),
    [
        ({1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}, 8),
        ({1: 8.0, 2: 4.0, 4: 3.9, 8: 1.0}, 2),  # four save less than a tenth
        ({1: 1.0, 2: 30.0, 4: 0.1, 8: 0.1}, 1),  # where two wait, four do
    ],
    ids=["all", "some", "one"],
)
def test_as_many_as_save_time(monkeypatch: pytest.MonkeyPatch, taken: dict[int, float], chosen: int) -> None:
    sample(monkeypatch, taken)
    with threads_that_pay(MODEL):
        assert torch.get_num_threads() == chosen
    assert torch.get_num_threads() == 8


def test_compilers_of_this_process_have_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no accident that a sample meets or not: their cores are left to them until they end."""
    asked = sample(monkeypatch, {1: 8.0, 2: 4.0, 4: 2.0, 6: 1.5, 7: 1.4, 8: 1.0})
    monkeypatch.setattr(threads, "_beside", {})
    monkeypatch.setattr(threads, "_MOMENT", 0.001)
    ended = [threads.take_core(), threads.take_core()]
    with threads_that_pay(MODEL):
        assert torch.get_num_threads() == 6
    more = [threads.take_core() for _ in range(20)]
    asked.clear()
    with threads_that_pay(MODEL):
        assert torch.get_num_threads() == 1 and not asked
    for event in (ended[0], *more):
        event.set()
    assert threads.cores_taken() == 1
    with threads_that_pay(MODEL):
        assert torch.get_num_threads() == 7
    assert torch.get_num_threads() == 8


def test_cores_that_are_given_back_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is inside of all, when it is told to look; outside of all, nobody has chosen anything."""
    asked = sample(monkeypatch, {1: 8.0, 2: 4.0, 4: 2.0, 7: 1.4, 8: 1.0})
    monkeypatch.setattr(threads, "_beside", {})
    monkeypatch.setattr(threads, "_MOMENT", 0.001)
    ended = [threads.take_core() for _ in range(7)]
    with threads_that_pay(MODEL), threads_that_pay(MODEL, 400):
        renew_threads()
        assert torch.get_num_threads() == 1 and not asked
        for event in ended[1:]:
            event.set()
        renew_threads()
        assert torch.get_num_threads() == 7
        asked.clear()
        renew_threads()
        assert torch.get_num_threads() == 7 and not asked
        ended.append(threads.take_core())
        for _ in range(5):
            ended.append(threads.take_core())
        renew_threads()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 8
    renew_threads()
    assert torch.get_num_threads() == 8


def test_only_what_has_just_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds all that it would make ends at once."""
    monkeypatch.setattr(threads, "_beside", {})
    monkeypatch.setattr(threads, "_MOMENT", 30.0)
    soon, late = threads.take_core(), threads.take_core()
    threads._beside[late] -= 60.0
    threading.Timer(0.05, soon.set).start()
    began = time.monotonic()
    assert threads.cores_taken() == 1 and soon.is_set()
    assert threads.cores_taken() == 1 and time.monotonic() - began < 20.0


def test_a_measurement_is_believed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only for the same sample and the same number of threads."""
    now = 100.0
    monkeypatch.setattr(threads.time, "monotonic", lambda: now)
    asked = sample(monkeypatch, {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0})

    def chosen(tokens: int = 32) -> int:
        asked.clear()
        with threads_that_pay(MODEL, tokens):
            return torch.get_num_threads()

    assert chosen() == 8 and asked
    assert chosen() == 8 and not asked
    assert chosen(400) == 8 and asked
    torch.set_num_threads(4)
    assert chosen() == 4 and asked
    now += threads._FRESH + 1
    assert chosen() == 4 and asked


def test_a_caller_has_his_threads_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sample(monkeypatch, {1: 1.0, 2: 30.0})
    with pytest.raises(RuntimeError, match="inside"), threads_that_pay(MODEL):
        raise RuntimeError("inside")
    assert torch.get_num_threads() == 8


def test_nothing_is_measured_where_nothing_is_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sample(monkeypatch, {})
    for nothing in (nn.Linear(4, 4, device="meta"), nn.ReLU()):
        with threads_that_pay(nothing):
            assert torch.get_num_threads() == 8
    torch.set_num_threads(1)
    with threads_that_pay(MODEL):
        assert torch.get_num_threads() == 1
    assert not asked


def test_a_sample_that_waits_is_given_up() -> None:
    sample = Sample.of(MODEL, 32)
    assert sample is not None
    assert sample.seconds(1, 4, 0.0) == float("inf")
    assert 0 < sample.seconds(2, 4) < float("inf")
    assert 1 <= threads._measured(sample, 3) <= 3


def test_the_sample_is_of_the_model() -> None:
    """A layer of many weights pays threads that a small one does not."""
    model = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 256, dtype=torch.bfloat16), nn.LayerNorm(64))
    model.append(nn.Linear(256, 64, dtype=torch.bfloat16))
    sample = Sample.of(model, 7)
    assert sample is not None
    assert sample.x.shape == (7, 128) and sample.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float64])
def test_weights_of_any_dtype_have_a_sample(dtype: torch.dtype) -> None:
    """Weights kept in fp8 are decoded before anything is multiplied."""
    sample = Sample.of(nn.ParameterList([nn.Parameter(torch.zeros(8, 8).to(dtype), requires_grad=False)]), 4)
    assert sample is not None and 0 < sample.seconds(1, 2) < float("inf")


def test_what_is_inside_is_measured_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(self: Sample, count: int, loops: int, most: float = float("inf")) -> float:
        return 1 / count if len(self.x) > 100 else float(count)

    monkeypatch.setattr(Sample, "seconds", seconds)
    with threads_that_pay(MODEL):
        assert torch.get_num_threads() == 1
        with threads_that_pay(MODEL, tokens=400):
            assert torch.get_num_threads() == 8
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 8


def test_what_is_compiled_is_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes their number into its code: only what looks at a model and proves it has fewer."""
    sample(monkeypatch, {1: 1.0, 2: 30.0})
    seen: dict[str, int] = {}
    for module, name in ((pipeline, "detect"), (api, "_emit")):
        function = getattr(module, name)

        def noted(*args: Any, name: str = name, function: Any = function) -> Any:
            seen[name] = torch.get_num_threads()
            return function(*args)

        monkeypatch.setattr(module, name, noted)
    kvcompile.optimize(make(NanoGPT), max_tokens=64, compile={"mode": "none"}, verify="quick")
    assert seen == {"detect": 1, "_emit": 8}
